"""Who comes late into a run of torchrun: by hand, started again by torchrun, or on a host that is added."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from on_processes.brake import Brake
from on_processes.commands import Started, wait_for
from on_processes.guest import Guest
from on_processes.runs import ending
from on_processes.test_torchrun import TORCHRUN, TRAIN
from on_processes.verb import POLYRHYTHM
from polyrhythm.events import CheckpointSaved, Event, RunEnded, RunStarted, WorkerJoined, WorkerProgress
from polyrhythm.reporting.event_log import read_events
from processes.family import stop
from processes.ports import free_port

SMALL = ["--batch-size", "8", "--threads", "1", "--out", "run"]
Start = Callable[..., Started]
BRAKED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from on_processes.brake import Brake
from polyrhythm.cli.main import main
Brake(Path("brake"), 5).on_every_model()
main()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a torchrun of a name with options of its own and of `train`, in ranks of a program."""
    with ending() as started:

        def begin(
            name: str, agents: list[str], options: list[str], program: Sequence[str] = (POLYRHYTHM,)
        ) -> Started:
            words = [*TORCHRUN, *agents, "--no-python", *program, *TRAIN, *SMALL, *options]
            started.append(Started(words, tmp_path, tmp_path / name))
            started[-1].run = tmp_path / "run"
            return started[-1]

        yield begin


def events(folder: Path) -> list[Event]:
    return read_events(folder / "run" / "events.jsonl")


def test_a_worker_joins_by_hand_what_torchrun_has_started(start: Start, tmp_path: Path) -> None:
    torchrun = start(
        "torchrun",
        ["--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"],
        ["--strategy", "ssp(s=2)", "--vacant", "1", "--listen", "0", "--epochs", "20", "--silence-s", "600"],
        [sys.executable, "-c", BRAKED],  # so that most of it is still to come
    )
    torchrun.wait_for(lambda event: isinstance(event, WorkerProgress))
    second = torchrun.children()[1]
    stop(second)  # worker 0 waits for it, and its door does not
    Brake(tmp_path / "brake", 5).release()
    place = "worker 2 (rank 3)"  # ranks of places come after those of torchrun, of which the last is a server
    with ending() as guests:
        guest = Guest(tmp_path, "guest", tmp_path / "run" / "join-token", place)
        guests.append(guest.command)
        wait_for(guest.has_a_place, "a place")
        os.kill(second, signal.SIGCONT)
        figures = torchrun.result().figures
        left = guest.result()
    assert (left.status, left.err.splitlines()[-1]) == (0, "done: all its steps are taken")
    assert (figures["workers"], figures["workers_lost"], figures["workers_joined"]) == (3, 1, 1)
    assert (figures["steps"], figures["images_not_seen"]) == (20 * 60, 0)
    assert sum(figures["staleness"]["histogram"].values()) == 3 * 20 * 60  # each gradient, once
    assert not (tmp_path / "run" / "join.json").exists()


def test_a_lost_rank_that_torchrun_starts_again_alone_is_a_successor(start: Start, tmp_path: Path) -> None:
    where = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--master-addr=127.0.0.1"]
    where.append(f"--master-port={free_port()}")
    options = ["--strategy", "synchronous", "--epochs", "100000", "--resume", "auto"]
    first, second = (start(f"host{host}", [*where, f"--node-rank={host}"], options) for host in range(2))
    first.wait_for(lambda event: isinstance(event, WorkerProgress))
    os.kill(second.children()[0], signal.SIGKILL)
    joined = first.wait_for(lambda event: isinstance(event, WorkerJoined))
    first.wait_for(
        lambda event: isinstance(event, WorkerProgress) and event.worker == 1 and event.time_s > joined.time_s
    )
    os.kill(first.children()[0], signal.SIGTERM)
    wait_for(lambda: isinstance(events(tmp_path)[-1], RunEnded), "the end")
    assert sum(isinstance(event, RunStarted) for event in events(tmp_path)) == 1
    end = events(tmp_path)[-1]
    assert isinstance(end, RunEnded)
    assert end.outcome == "interrupted"
    assert (end.result["workers_lost"], end.result["workers_joined"], end.result["images_not_seen"]) == (
        1,
        1,
        0,
    )


def test_when_worker_0_dies_all_start_again_from_the_last_checkpoint(start: Start) -> None:
    where = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--master-addr=127.0.0.1"]
    where.append(f"--master-port={free_port()}")
    options = ["--strategy", "synchronous", "--epochs", "100000", "--resume", "auto"]
    first, second = (start(f"host{host}", [*where, f"--node-rank={host}"], options) for host in range(2))
    (early,) = wait_for(first.children, "its rank")
    os.kill(early, signal.SIGKILL)  # while it is being loaded
    first.wait_for(lambda event: isinstance(event, CheckpointSaved))
    leader, other = first.children()[0], second.children()[0]
    os.kill(leader, signal.SIGKILL)
    again = first.wait_for(lambda event: isinstance(event, RunStarted) and event.start_epoch > 0)
    first.wait_for(
        lambda event: (
            isinstance(event, WorkerProgress)
            and event.worker == 1
            and event.step > again.to_json()["start_step"]
        )
    )
    assert leader not in first.children()
    assert other not in second.children()
    assert again.to_json()["workers"] == 2


def test_a_host_that_is_added_takes_part_from_the_last_checkpoint(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # without it torchrun lets no host in later
    where = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=test",
    ]
    where += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    options = ["--strategy", "synchronous", "--epochs", "100000", "--resume", "auto"]
    first = start("host0", [*where, "--rdzv-conf=is_host=1,last_call_timeout=1"], options)
    first.wait_for(lambda event: isinstance(event, WorkerProgress) and event.epoch > 1)
    start("host1", [*where, "--rdzv-conf=is_host=0,last_call_timeout=1"], options)
    again = first.wait_for(lambda event: isinstance(event, RunStarted) and event.workers == 2)
    assert isinstance(again, RunStarted)
    first.wait_for(lambda event: isinstance(event, WorkerProgress) and event.worker == 1)
    alone = [event for event in events(tmp_path) if isinstance(event, RunEnded)]
    assert [event.outcome for event in alone] == ["interrupted"]
    assert again.start_epoch > 0
