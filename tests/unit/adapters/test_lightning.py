"""Lightning's own trainer with strategies of Polyrhythm, on workers that are threads.

Lightning is imported where it is used, not where tests are collected: it takes seconds, in each process of pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from polyrhythm.errors import RequestError
from tolerances import REORDERED
from unit.api.loop.threads import run_in_threads

if TYPE_CHECKING:
    from unit.adapters.lightning_task import Classifier

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about loaders, its own future and torch's


def vector(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Classifier]]:
    """Fits on workers that are threads: each joins as the group of its own thread."""
    from polyrhythm.adapters import lightning as adapter
    from unit.adapters.lightning_task import BATCH_SIZE, Classifier, fitted

    groups: dict[int, Group] = {}
    monkeypatch.setattr(adapter, "join", lambda *_, **__: groups[threading.get_ident()])

    def run(
        spec: str, folder: Path, workers: int = 2, kind: type[Classifier] = Classifier, **options: Any
    ) -> list[Classifier]:
        modules = [kind() for _ in range(workers)]

        def loop(group: Group) -> Classifier:
            groups[threading.get_ident()] = group
            strategy = adapter.PolyrhythmStrategy(spec)
            return fitted(folder, BATCH_SIZE, module=modules[group.rank], strategy=strategy, **options)

        return run_in_threads(spec, workers, loop)

    return run


def plain(folder: Path, workers: int = 2, **options: Any) -> Classifier:
    from unit.adapters.lightning_task import BATCH_SIZE, Classifier, fitted

    return fitted(folder, BATCH_SIZE * workers, module=Classifier(), **options)


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(servers=2, consistency=synchronous)"])
def test_in_step_it_is_the_trainer_alone(spec: str, tmp_path: Path, fit: Any) -> None:
    """With a ragged batch, clipping, a schedule, validation and checkpoints."""
    expected = plain(tmp_path / "plain")
    for each in fit(spec, tmp_path):
        torch.testing.assert_close(vector(each), vector(expected), **REORDERED)
        assert each.accuracy == pytest.approx(expected.accuracy, abs=1e-12)


@pytest.mark.parametrize(("validation", "workers"), [(11, 2), (33, 2), (17, 3)])
def test_each_image_is_validated_once(validation: int, workers: int, tmp_path: Path, fit: Any) -> None:
    """Also where one worker has one batch more than another."""
    expected = plain(tmp_path / "plain", workers, validation=validation)
    for each in fit("synchronous", tmp_path, workers, validation=validation):
        assert each.tested == expected.tested == [validation] * 3
        assert each.accuracy == pytest.approx(expected.accuracy, abs=1e-12)


def test_gradients_are_accumulated_as_alone(tmp_path: Path, fit: Any) -> None:
    expected = plain(tmp_path / "plain", accumulate_grad_batches=2)
    (first, _) = fit("synchronous", tmp_path, accumulate_grad_batches=2)
    torch.testing.assert_close(vector(first), vector(expected), **REORDERED)


def test_a_backbone_that_is_thawed_by_a_callback_trains_as_alone(tmp_path: Path, fit: Any) -> None:
    """Lightning's `BackboneFinetuning` adds the backbone's parameters to the optimizer in epoch 1."""
    from lightning.pytorch.callbacks import BackboneFinetuning

    from unit.adapters.lightning_task import BATCH_SIZE, Finetuned, fitted

    def thawing() -> Any:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    expected = fitted(tmp_path / "plain", 2 * BATCH_SIZE, module=Finetuned(), more=[thawing])
    begun = Finetuned()
    for each in fit("synchronous", tmp_path, kind=Finetuned, more=[thawing]):
        torch.testing.assert_close(vector(each), vector(expected), **REORDERED)
        assert not torch.equal(each.backbone.weight, begun.backbone.weight)


@pytest.mark.parametrize("spec", ["local_sgd(steps=16)", "parameter_server(servers=2)", "ad_psgd"])
def test_all_end_with_one_model_that_has_learned(spec: str, tmp_path: Path, fit: Any) -> None:
    first, second = fit(spec, tmp_path)
    assert torch.equal(vector(first), vector(second))
    assert first.accuracy[-1] > 0.6


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(servers=2, consistency=synchronous)"])
def test_a_checkpoint_of_lightnings_holds_the_whole_run(spec: str, tmp_path: Path, fit: Any) -> None:
    whole = fit(spec, tmp_path)
    later = fit(spec, tmp_path, resumes="epoch=0.ckpt")
    for before, after in zip(whole, later, strict=True):
        assert torch.equal(vector(before), vector(after))
        assert after.accuracy == before.accuracy[1:]


def test_several_optimizers_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyrhythm.adapters import lightning as adapter
    from unit.adapters.lightning_task import TwoOptimizers, fitted

    def loop(group: Group) -> str:
        monkeypatch.setattr(adapter, "join", lambda *_, **__: group)
        with pytest.raises(RequestError) as error:
            fitted(tmp_path, 8, module=TwoOptimizers(), strategy=adapter.PolyrhythmStrategy())
        return str(error.value)

    (line,) = run_in_threads("synchronous", 1, loop)
    assert "returns 2 optimizers: give one, with param groups" in line
