"""`polyrhythm train` as torchrun starts it: on one host, and on two."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from on_processes.commands import Started, finished, shell
from on_processes.runs import ending
from on_processes.two_hosts import ip
from on_processes.verb import POLYRHYTHM
from polyrhythm.api.simulate import simulate
from polyrhythm.events import CheckpointSaved, Evaluated, RunEnded, RunStarted, WorkerProgress
from polyrhythm.reporting.event_log import read_events
from processes.family import are_gone, stop
from processes.ports import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = ["train", "--data", "digits", "--model", "mlp", "--balance", "off", "--json"]


def torchrun(processes: int, *options: str) -> list[str]:
    return [
        *TORCHRUN,
        *(f"--nproc-per-node={processes}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
        *("--no-python", POLYRHYTHM, *TRAIN, *options),
    ]


def complaints(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error: ")]


def test_two_workers_and_a_server(tmp_path: Path) -> None:
    synchronous = ["--strategy", "parameter_server(servers=1, consistency=synchronous)", "--epochs", "2"]
    figures = finished(torchrun(3, *synchronous, "--out", "torchrun"), tmp_path).figures
    assert (figures["workers"], figures["servers"], figures["steps"]) == (2, 1, 24)
    assert (tmp_path / "torchrun" / "model.safetensors").is_file()
    (local,) = shell(tmp_path, [*TRAIN, *synchronous, "--workers", "2", "--out", "local"])
    for key in ("parameters_sha256", "test_loss", "train_loss", "bytes_sent_per_step", "staleness"):
        assert figures[key] == local.figures[key], key
    again = finished(torchrun(3, *synchronous, "--out", "torchrun", "--resume", "auto"), tmp_path)
    assert again.figures == figures
    assert again.err.count("torchrun has done its 2 epochs already") == 1


def test_stages_go_on_in_the_same_processes(tmp_path: Path) -> None:
    """The processes that a stage needs no servers for work, as many as there are; else it is the run of a launcher."""
    spec = (
        'stages("synchronous until 1 epochs; local_sgd(steps=4) until 2 epochs; '
        'parameter_server(servers=1, consistency=synchronous)")'
    )
    options = ["--strategy", spec, "--epochs", "3"]
    done = finished(torchrun(2, *options, "--out", "torchrun"), tmp_path)
    stages = [(each["strategy"], each["epochs"]) for each in done.figures["stages"]]
    assert stages == [
        ("synchronous", 1),
        ("local_sgd(steps=4)", 1),
        ("parameter_server(consistency=synchronous)", 1),
    ]
    events = read_events(tmp_path / "torchrun" / "events.jsonl")
    starts = [event for event in events if isinstance(event, RunStarted)]
    assert [(each.workers, each.servers, each.start_epoch) for each in starts] == [
        (2, 0, 0),
        (2, 0, 1),
        (1, 1, 2),
    ]
    assert [type(event) for event in events].count(RunEnded) == 3
    (local,) = shell(tmp_path, [*TRAIN, *options, "--workers", "2", "--out", "local"])
    losses = [
        [
            event.test_loss
            for event in read_events(tmp_path / run / "events.jsonl")
            if isinstance(event, Evaluated)
        ]
        for run in ("torchrun", "local")
    ]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] < losses[0][1]
    assert local.figures["stages"] == done.figures["stages"]
    again = finished(torchrun(2, *options, "--out", "torchrun", "--resume", "auto"), tmp_path)
    assert again.err.count("torchrun has done its 3 epochs already") == 1


def test_members_of_an_ensemble_share_out_the_ranks(tmp_path: Path) -> None:
    """Each is the run that it would be elsewhere, and so is the student, by all ranks."""
    options = ["--strategy", "ensemble(members=2)", "--distill", "mlp(hidden=[16])", "--epochs", "1"]
    figures = finished(torchrun(2, *options, "--out", "torchrun"), tmp_path).figures
    expected = simulate(
        cluster="office",
        data="digits",
        model="mlp",
        workers=2,
        epochs=1,
        strategy="ensemble(members=2)",
        distill="mlp(hidden=[16])",
        out=tmp_path / "simulated",
    ).figures
    for key in ("parameters_sha256", "test_top1", "ensemble", "workers"):
        assert figures[key] == expected[key], key
    assert [each["parameters_sha256"] for each in figures["members"]] == [
        each["parameters_sha256"] for each in expected["members"]
    ]


def test_ranks_that_never_join_are_named(tmp_path: Path) -> None:
    hangs = 'if [ "$RANK" = 1 ]; then exec sleep 600; else exec "$0" "$@"; fi'
    command = torchrun(2, "--gather-s", "0.5", "--out", "run")
    at = command.index("--no-python") + 1
    done = finished([*command[:at], "sh", "-c", hangs, *command[at:]], tmp_path)
    assert done.status == 1
    said = "error: rank 1 has not joined within 0.5 s: see what becomes of it there before it trains, or give it longer"
    assert f"{said} with --gather-s" in complaints(done.err)


def test_a_wrong_request_is_said_once(tmp_path: Path) -> None:
    done = finished(torchrun(2, "--strategy", "synchronus"), tmp_path)
    assert done.status != 0
    assert done.out == ""
    assert complaints(done.err) == ["error: unknown strategy 'synchronus': did you mean synchronous?"]
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_in_the_middle_leaves_in_order(tmp_path: Path) -> None:
    hot = [
        "--model",
        "lenet5(widths=[4, 8])",
        "--optimizer",
        "sgd(lr=1e20)",
        "--strategy",
        "parameter_server",
    ]
    done = finished(torchrun(3, *hot, "--out", "run"), tmp_path)
    assert done.status != 0
    assert done.out == ""
    assert any("the loss is " in line and "learning rate" in line for line in complaints(done.err))
    assert "terminate called" not in done.err
    assert "Fatal Python error" not in done.err
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert isinstance(end, RunEnded)
    assert end.outcome == "failed"


def test_sigterm_to_torchrun_leaves_a_checkpoint(tmp_path: Path) -> None:
    endless = ["--batch-size", "3", "--epochs", "100000", "--out", "run"]
    with ending() as commands:
        started = Started(torchrun(2, *endless), tmp_path, tmp_path / "run")
        commands.append(started)
        started.wait_for(lambda event: isinstance(event, WorkerProgress) and event.epoch == 1)
        ranks = started.children()
        started.process.terminate()
        result = started.result()
    assert result.status != 0
    assert "interrupted; continue with: polyrhythm train --resume run" in result.err
    assert "terminate called" not in result.err
    assert len(ranks) == 2
    assert are_gone(ranks)
    *_, saved, end = read_events(started.run / "events.jsonl")
    assert isinstance(end, RunEnded)
    assert end.outcome == "interrupted"
    assert isinstance(saved, CheckpointSaved)


def test_hosts_whose_torchruns_have_restarted_unequally_often_go_on_together(tmp_path: Path) -> None:
    command = [
        *(*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"),
        *(
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            "--rdzv-id=test",
            "--local-addr=127.0.0.1",
            "--no-python",
        ),
        *("sh", "-c", 'exec "$0" "$@" --epochs "$(cat epochs)"', POLYRHYTHM, *TRAIN, "--batch-size", "3"),
        *("--threads", "1", "--out", "run", "--resume", "auto"),
    ]
    (tmp_path / "epochs").write_text("100000")  # it does not end before
    with ending() as hosts:
        hosts += [Started(command, tmp_path, tmp_path / f"host{number}") for number in range(2)]
        hosts[0].run = tmp_path / "run"
        hosts[0].wait_for(lambda event: isinstance(event, CheckpointSaved))
        (rank,) = [host.children()[0] for host in hosts if _variable(host.children()[0], "RANK") == "1"]
        stop(rank)  # without it the other ends no epoch but the one that is under way
        begun = max(
            event.epoch
            for event in read_events(hosts[0].run / "events.jsonl")
            if isinstance(event, CheckpointSaved)
        )
        epochs = begun + 3
        (tmp_path / "epochs").write_text(str(epochs))
        os.kill(rank, signal.SIGKILL)  # its torchrun counts a restart, the other one does not
        results = [host.result() for host in hosts]
    assert [result.status for result in results] == [0, 0], results
    (figures,) = [json.loads(result.out) for result in results if result.out]
    assert (figures["workers"], figures["workers_lost"], figures["epochs"]) == (2, 0, epochs)
    assert [result.err.count(", resumed after epoch ") for result in results if result.out] == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
class TestTwoHosts:
    """Two network namespaces with a cable between them."""

    def test_workers_and_servers_on_both(self, tmp_path: Path, hosts: list[str]) -> None:
        with ending() as agents:
            agents += [self._agent(number, host, tmp_path) for number, host in enumerate(hosts)]
            ends = [agent.result() for agent in agents]
        assert [end.status for end in ends] == [0, 0], ends
        figures = [json.loads(end.out) for end in ends if end.out]
        assert len(figures) == 1, "rank 0 alone prints the figures"
        assert (figures[0]["workers"], figures[0]["servers"]) == (2, 2)
        # The workers draw from one deal of 1438 images, in batches of 64, twice; each takes what it can.
        batches = 2 * -(-1438 // 64)
        assert batches / 2 <= figures[0]["steps"] <= batches
        assert sum(figures[0]["staleness"]["histogram"].values()) == 2 * batches
        for host in hosts:  # a worker and a server on each: gradients and parameters crossed the cable
            assert _received_bytes(host) > 22 * figures[0]["bytes_sent_per_step"] / 4

    def _agent(self, number: int, host: str, folder: Path) -> Started:
        command = [
            *(
                "ip",
                "netns",
                "exec",
                host,
                *TORCHRUN,
                "--nnodes=2",
                "--nproc-per-node=2",
                f"--node-rank={number}",
            ),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=10.78.0.1:29400", "--rdzv-id=test"),
            *(f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr=10.78.0.{number + 1}"),
            *("--no-python", POLYRHYTHM, *TRAIN, "--epochs", "2", "--out", "run"),
            *("--strategy", "parameter_server(servers=2)"),
        ]
        return Started(command, folder, folder / f"host{number}")


def _variable(process: int, name: str) -> str:
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)[name]


def _received_bytes(host: str) -> int:
    found = json.loads(ip("-n", host, "-s", "-j", "link", "show", "dev", "cable"))
    return int(found[0]["stats64"]["rx"]["bytes"])
