"""Other tools' trainers on real processes: equal to the same program alone, and a worker that is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from on_processes.forked_script import run_forked
from tolerances import REORDERED
from unit.adapters import accelerate_task, lightning_task, transformers_task

ACCELERATE, LIGHTNING, TRANSFORMERS = (
    task.__file__ for task in (accelerate_task, lightning_task, transformers_task)
)


def saved(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]


def vector(entry: dict[str, Any]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in entry["model"].values()])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Accelerate's own accelerator comes to, in this process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        accelerate_task.main("plain", folder, "2")
    AcceleratorState._reset_state(reset_partial_state=True)
    (found,) = saved(folder)
    return found


@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server(servers=2, consistency=synchronous)"])
def test_an_accelerated_loop_in_step_is_the_one_alone_and_goes_on_from_its_state(
    strategy: str, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """With accumulation, clipping, a schedule, metrics and a ragged batch; then from the middle of the run."""
    for how in ("saves", "resumed"):
        run_forked(ACCELERATE, [strategy, str(tmp_path), "2", how], tmp_path, workers=2, restarts=0)
        found = saved(tmp_path)
        assert [(each["processes"], each["main"], each["mean"]) for each in found] == [
            (2, True, 0.5),
            (2, False, 0.5),
        ]
        for each in found:
            torch.testing.assert_close(vector(each), vector(alone), **REORDERED)
            assert (each["tested"], each["accuracy"]) == (alone["tested"], alone["accuracy"])
            assert each["rate"] == pytest.approx(alone["rate"], rel=1e-12)
            (tmp_path / "worker-0.pt").unlink(missing_ok=True)
        (tmp_path / "worker-1.pt").unlink()


def test_an_accelerated_loop_survives_a_worker(tmp_path: Path) -> None:
    arguments = ["local_sgd(steps=2)", str(tmp_path), "2", "killed"]
    assert "Traceback" not in run_forked(ACCELERATE, arguments, tmp_path, workers=2, restarts=0)
    (found,) = saved(tmp_path)
    assert found["accuracy"] > 0.7


def test_lightnings_trainer_survives_a_worker(tmp_path: Path) -> None:
    arguments = ["synchronous", str(tmp_path), "2", "killed"]
    assert "Traceback" not in run_forked(LIGHTNING, arguments, tmp_path, workers=2, restarts=0)
    (found,) = saved(tmp_path)
    assert len(found["accuracy"]) == lightning_task.EPOCHS
    assert found["accuracy"][-1] > 0.6


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Transformers' own trainer comes to, in this process."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        transformers_task.main("plain", folder, "2")
    AcceleratorState._reset_state(reset_partial_state=True)
    (found,) = saved(folder)
    return found


def test_transformers_trainer_in_step_is_the_one_alone_and_goes_on_from_its_checkpoint(
    tmp_path: Path, trained_alone: dict[str, Any]
) -> None:
    """With accumulation, clipping, a schedule, metrics and ragged batches; then from the middle of an epoch."""
    for how in ("saves", "resumed"):
        run_forked(TRANSFORMERS, ["synchronous", str(tmp_path), "2", how], tmp_path, workers=2, restarts=0)
        found = saved(tmp_path)
        assert len(found) == 2
        for each in found:
            torch.testing.assert_close(vector(each), vector(trained_alone), **REORDERED)
            assert (each["steps"], each["later"]) == (trained_alone["steps"], trained_alone["later"])
            assert each["rate"] == pytest.approx(trained_alone["rate"], abs=1e-15)
            assert each["accuracy"] == trained_alone["accuracy"]
        for worker in (0, 1):
            (tmp_path / f"worker-{worker}.pt").unlink()


def test_transformers_trainer_survives_a_worker(tmp_path: Path) -> None:
    arguments = ["parameter_server", str(tmp_path), "2", "killed"]
    assert "Traceback" not in run_forked(TRANSFORMERS, arguments, tmp_path, workers=2, restarts=0)
    (found,) = saved(tmp_path)
    assert len(found["accuracy"]) == transformers_task.EPOCHS
    assert found["later"] > 0.6
