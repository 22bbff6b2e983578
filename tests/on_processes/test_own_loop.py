"""A loop of one's own on real processes, started in both ways, with every strategy."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from on_processes import own_loop_task, staged_loop_task
from on_processes.commands import finished
from on_processes.forked_script import run_forked
from polyrhythm.errors import RunError
from polyrhythm.launch.script import run_script
from tolerances import REORDERED

TASK = own_loop_task.__file__
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "own_loop.py")
PATIENCE_S = 100.0
"""Much less than a rank would wait for one that is gone, and says nothing."""


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def torchrun(processes: int, *command: str) -> str:
    """Gives the standard output."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *command]
    done = finished(program, Path.cwd())
    assert done.status == 0, done.err
    return done.out


def saved(folder: Path) -> list[dict[str, Any]]:
    """Gives what each worker has saved, in their order."""
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]


def vector(entry: dict[str, Any]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in entry["model"].values()])


@pytest.mark.parametrize(
    ("workers", "servers", "strategy"),
    [
        (2, 0, "synchronous"),
        (2, 2, "parameter_server(servers=2, consistency=synchronous)"),
        (3, 1, "mixed(replicas=2, consistency=synchronous)"),
    ],
    ids=["synchronous", "parameter_server", "mixed"],
)
def test_workers_in_step_are_one_worker_with_the_whole_batch(
    tmp_path: Path, workers: int, servers: int, strategy: str
) -> None:
    """With a ragged last batch, a shuffle, a schedule and accumulated gradients; in float64, to rounding."""
    arguments = [strategy, str(tmp_path)]
    if servers == 2:
        torchrun(workers + servers, TASK, *arguments)
    elif servers:
        run_forked(TASK, arguments, tmp_path, workers=workers, restarts=0)
    else:
        run_script(TASK, arguments, workers=workers)

    found = saved(tmp_path)
    assert [entry["leads"] for entry in found] == [True] + [False] * (workers - 1)
    assert [entry["steps"] for entry in found] == [3 * 3 + 2] * workers
    expected = own_loop_task.plain_parameters(workers)
    torch.testing.assert_close(vector(found[0]), expected, **REORDERED)
    for entry in found[1:]:
        assert torch.equal(vector(entry), vector(found[0]))
    ranks = range(workers)
    mean = sum(rank * (rank + 1) for rank in ranks) / sum(rank + 1 for rank in ranks)
    assert [entry["mean"] for entry in found] == pytest.approx([mean] * workers, rel=1e-15)
    assert set(found[0]["staleness"]) == {0}


def test_stages_of_a_loop_are_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Servers come with the second stage; model, momenta, schedule and epochs go on, so that it equals plain torch."""
    served = "parameter_server(servers=1, consistency=synchronous)"
    run_script(
        staged_loop_task.__file__,
        [f'stages("synchronous until 1 epochs; {served}")', str(tmp_path)],
        workers=2,
    )
    found = saved(tmp_path)
    assert [entry["steps"] for entry in found] == [3 * 4] * 2
    for entry in found:
        torch.testing.assert_close(vector(entry), staged_loop_task.plain_parameters(), **REORDERED)
    assert "continues from the model of synchronous, with its optimizer's state" in capfd.readouterr().err


def test_stages_of_a_loop_go_on_in_torchruns_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both train in the first stage; the second has one for its server, and the state by way of the other."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    served = "parameter_server(servers=1, consistency=synchronous)"
    torchrun(2, staged_loop_task.__file__, f'stages("synchronous until 1 epochs; {served}")', str(tmp_path))
    (entry,) = saved(tmp_path)
    assert entry["steps"] == 4 + 8 + 8
    expected = staged_loop_task.plain_parameters((2, 1, 1))
    torch.testing.assert_close(vector(entry), expected, **REORDERED)
    assert not list(temporary.glob("polyrhythm-stages-*"))


@pytest.mark.timeout(400)  # its ranks import all that an example does
def test_the_example_learns_in_mixed_mode_under_torchrun() -> None:
    printed = torchrun(3, EXAMPLE, "--strategy", "mixed(replicas=1)", "--epochs", "8")
    assert accuracy_of_example(printed, workers=2, epochs=8) > 0.93


def accuracy_of_example(printed: str, workers: int, epochs: int) -> float:
    """Return the final accuracy; one worker speaks for all, and the loss falls."""
    losses = [float(loss) for loss in re.findall(r"^epoch .* loss (\S+)$", printed, re.MULTILINE)]
    assert len(losses) == epochs
    assert losses[-1] < losses[0] / 3
    [(said, accuracy)] = re.findall(r"^(\d+) workers: accuracy (\S+)$", printed, re.MULTILINE)
    assert int(said) == workers
    return float(accuracy)


@pytest.mark.parametrize(
    ("strategy", "failure", "words"),
    [
        ("synchronous", "body", "left with status 1"),
        (
            "mixed(inside=local_sgd)",
            "killed",
            r"was killed by SIGKILL; mixed\(inside=local_sgd\) survives the loss of a worker under polyrhythm "
            r"train only, "
            "not in a loop of your own",
        ),
    ],
)
def test_a_worker_that_fails_ends_the_others_soon(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    failure: str,
    words: str,
) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=rf"^worker 1 \(rank 1\) {words}$"):
        run_script(TASK, [strategy, str(tmp_path), failure], workers=2)
    assert time.monotonic() - started < PATIENCE_S
    printed = capfd.readouterr().err
    assert ("worker 1 has had enough" in printed) == (failure == "body")
    assert saved(tmp_path) == []
