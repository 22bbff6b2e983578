"""What a run cannot print or write for people to see ends nothing; it is counted, and said in the end."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from conformance.clean_process import CONTEXT
from on_processes.commands import Started, environment, wait_for
from on_processes.faults.storing import small_disk
from on_processes.verb import POLYRHYTHM
from polyrhythm.cli.main import main
from polyrhythm.events import Evaluated, Notice, RunEnded
from polyrhythm.launch.process import open_standard_descriptors
from polyrhythm.models.weights import read_tensors
from polyrhythm.reporting.event_log import read_events
from processes.family import are_gone, children

CLONE_NEWNET = 0x40000000
TRAIN = [
    *(POLYRHYTHM, "train", "--data", "digits", "--model", "mlp(hidden=[4])", "--epochs", "1"),
    *("--batch-size", "256", "--out", "run"),
]


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_standard_error_on_a_full_disk_ends_nothing_and_is_counted(tmp_path: Path) -> None:
    train = " ".join(f"'{word}'" for word in TRAIN)
    done = shell(tmp_path, f"{train} --json 2>/dev/full")
    assert done.returncode == 0
    assert json.loads(done.stdout)["epochs"] == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()
    *_, notice, end = read_events(tmp_path / "run" / "events.jsonl")
    assert isinstance(end, RunEnded)
    assert isinstance(notice, Notice)
    count, _, rest = notice.text.partition(" ")
    assert int(count) > 100  # the line about what is trained and the line of the test
    assert rest == "bytes could not be written to standard error (No space left on device)"


@pytest.mark.parametrize(
    ("to", "said"), [("| true", ""), (">/dev/full", "could not be written to standard output (No space left")]
)
def test_a_run_is_done_whoever_reads_its_figures(to: str, said: str, tmp_path: Path) -> None:
    train = " ".join(f"'{word}'" for word in TRAIN)
    done = shell(tmp_path, f"{train} --json {to}")
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_figures_that_are_all_a_verb_makes_must_be_written(tmp_path: Path) -> None:
    full = shell(tmp_path, f"'{POLYRHYTHM}' strategies >/dev/full")
    assert full.returncode == 1
    assert "could not be written to standard output (No space left on device)" in full.stderr
    assert shell(tmp_path, f"'{POLYRHYTHM}' strategies | head -1 >/dev/null").returncode == 0


def test_closed_descriptors_end_nothing(tmp_path: Path) -> None:
    train = " ".join(f"'{word}'" for word in TRAIN)
    done = shell(tmp_path, f"{train} <&- >&- 2>&-")
    assert done.returncode == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_no_file_of_a_run_takes_the_number_of_a_closed_output() -> None:
    process = os.fork()
    if not process:
        os.closerange(0, 3)
        open_standard_descriptors()
        os._exit(sum(os.readlink(f"/proc/self/fd/{number}") != os.devnull for number in range(3)))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_killed_launcher_leaves_no_traces_of_other_programs_stacks(tmp_path: Path) -> None:
    command = [*TRAIN, "--epochs", "100000", "--batch-size", "64"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=said)
    log = tmp_path / "run" / "events.jsonl"
    wait_for(lambda: log.exists() and '"Evaluated"' in log.read_text(), "the second epoch")
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: are_gone(ranks), "the ranks to leave")
    for line in (tmp_path / "said").read_text().splitlines():
        assert line.startswith(("training ", "epoch ")), line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_a_loopback_that_is_down_is_told_before_anything_is_written(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=without_loopback, args=(TRAIN[1:], str(tmp_path)))
    process.start()
    process.join(60)
    assert process.exitcode == 2
    assert (tmp_path / "said").read_text().splitlines() == [
        "error: the loopback interface, on which ranks meet, does not answer (Network is unreachable): bring it up, as "
        "with `ip link set lo up`"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def without_loopback(arguments: list[str], folder: str) -> None:
    """Runs a verb in a network of its own that has nothing but a loopback interface, which is down."""
    os.chdir(folder)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    main(arguments)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_the_last_bytes_of_a_disk_are_the_models(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        options = ["--epochs", "300", "--batch-size", "64", "--keep-checkpoints", "0"]
        words = [*TRAIN[:-2], *options, "--out", disk / "run"]
        command = Started(words, tmp_path, disk / "run", said_in=tmp_path)
        command.wait_for(lambda event: isinstance(event, Evaluated))
        with suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
            while other.write(bytes(4096)):
                pass
        assert command.process.poll() is None, "it ended before the disk was full"
        result = command.result()
        assert result.status == 0, result.err
        assert "events are dropped until it can be written" in result.err
        assert read_tensors(disk / "run" / "model.safetensors")
