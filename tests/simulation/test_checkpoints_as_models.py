"""A checkpoint, read as a model, gives the accuracy and loss that were told when it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import polyrhythm
from conformance.jobs import make_job, simulated
from polyrhythm.config.recipe import CONFIG_FILE, configure, write_recipe
from polyrhythm.config.trained import fill
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import evaluate
from polyrhythm.events import Evaluated
from polyrhythm.models.weights import save_weights
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.training.checkpoint import checkpoints, keep_best

SPECS = ["synchronous", "parameter_server(consistency=asynchronous)", "local_sgd", "sgp", "easgd"]


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def _shown(job, path: Path) -> tuple[float, float]:
    model = job.make_model()
    fill(model, path)
    found = evaluate(model, job.dataset.test, classes=job.dataset.classes)
    return found.loss, found.top1


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_the_model_that_was_tested(spec: str, average: float, tmp_path: Path) -> None:
    job = make_job(spec, 2, model=normed, folder=tmp_path, checkpoints=9, epochs=3, weight_average=average)
    told = [event for event in simulated(job).events if isinstance(event, Evaluated)]
    oldest_first = checkpoints(tmp_path / FOLDER)[::-1]
    assert len(told) == len(oldest_first) == 3
    # The last one is told after all have met.
    for event, path in zip(told[:2], oldest_first[:2], strict=True):
        loss, top1 = _shown(job, path)
        assert (loss, top1) == pytest.approx((event.test_loss, event.test_top1), rel=1e-6)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of digits whose best checkpoint is not its last one."""
    training = {"data": "digits", "model": "mlp", "workers": 2, "epochs": 3, "threads": 1, "seed": 1}
    polyrhythm.simulate(**training, cluster="office", keep_checkpoints=9, out=tmp_path / "run")
    folder = tmp_path / "run" / FOLDER
    keep_best(checkpoints(folder)[1], 1.0)
    return tmp_path / "run"


def test_the_verb_tests_the_best_checkpoint_of_a_run(run: Path) -> None:
    best, last = polyrhythm.evaluate(run, best=True), polyrhythm.evaluate(run)
    by_name = polyrhythm.evaluate(next((run / FOLDER).glob("best-*")))
    assert best["test_loss"] == by_name["test_loss"] != last["test_loss"]
    assert "best-top1-1.000000" in best["weights"]
    newest = checkpoints(run / FOLDER)[0]
    assert polyrhythm.evaluate(newest)["test_loss"] == last["test_loss"]


def test_a_run_without_a_best_checkpoint_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_recipe(configure({"data": "digits", "model": "mlp"}), tmp_path / CONFIG_FILE)
    save_weights(nn.Linear(1, 1), tmp_path / "model.safetensors", {})
    with pytest.raises(RequestError, match="keeps no best checkpoint: train with --keep-best"):
        polyrhythm.evaluate(tmp_path, best=True)
