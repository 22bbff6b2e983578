"""Tests of trained models, for the verb `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from polyrhythm.config.recipe import configure
from polyrhythm.config.run_config import EvaluateOptions, refuse_unknown
from polyrhythm.config.trained import Trained, best_of, load_trained, voters
from polyrhythm.data.resized import HasWhole
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.calibration import (
    Calibration,
    answered,
    calibration_error,
    fit_temperature,
    save_calibration,
    tempered,
)
from polyrhythm.evaluation.ensemble import average, greedy_selection, log_probabilities
from polyrhythm.evaluation.evaluate import Evaluation, evaluate_scores, in_evaluation_mode
from polyrhythm.evaluation.evaluate import evaluate as evaluate_model
from polyrhythm.evaluation.views import ViewedClassifier, Views


def evaluate(
    weights: str | Path | Sequence[str | Path],
    *,
    data: Any = None,
    model: Any = None,
    batch_size: int = 500,
    device: str = "auto",
    **options: Unpack[EvaluateOptions],
) -> dict[str, Any]:
    """Test a model, or several that vote, on the test images of some data.

    Args:
        weights: a run folder, a file of weights or a checkpoint of a run; several make an ensemble, the mean of their
            probabilities.
        data: test data; None: the data that the run was trained on.
        model: the network; None: the run's.
        batch_size: images at a time.
        device: `cpu`, `cuda` or `auto`.
        **options: `image_size` and `skip_unreadable`, as for `train`; `dense`, `ten_crop`, `flip` and
            `scales` (a list of pixels), see `Views`; `best`: test the runs' checkpoints of the highest test
            accuracy; `greedy`: choose the members on every second test image, and test on the others;
            `calibrate`: fit the temperature of the probabilities on every second test image, and report its
            effect on the others.

    Returns:
        `weights`, `data`, `model`, `images`, `test_loss`, `test_top1`, `test_top5`, `test_balanced_accuracy`
        (fractions), `test_top1_interval` (95 %), `per_class` and `confused`; `views` and `dense` unless the only view
        is the image itself; `region`, where these views see what training did not; `members` and `selected` of an
        ensemble; `calibration`: `temperature`, `images`, `loss` and `error` (expected calibration error) without it
        and with it, `answered` by threshold, and the `file` next to the weights, where `predict` finds it, of one
        network.

    Raises:
        RequestError: the request is invalid.
    """
    refuse_unknown(options, EvaluateOptions)
    configure({"batch_size": batch_size})  # one that cannot be, for example
    asked: dict[str, Any] = {**options}
    named = [weights] if isinstance(weights, str | Path) else list(weights)
    paths: list[str | Path] = [path for each in named for path in voters(Path(each))]
    if asked.pop("best", False):
        paths = [best_of(Path(path)) for path in paths]
    views = Views.taken_from(asked)
    greedy, calibrate = bool(asked.pop("greedy", False)), bool(asked.pop("calibrate", False))
    if greedy and calibrate:
        raise RequestError(
            "--greedy and --calibrate both need every second image for themselves: give one of them"
        )
    if greedy and len(paths) < 2:
        raise RequestError("--greedy chooses among several models: name more than one")
    trained = [load_trained(path, data=data, model=model, device=device, **asked) for path in paths]
    _check_together(trained)
    classifiers = [
        ViewedClassifier(
            each.model,
            each.dataset.test,
            views.at_scale_of(each.dataset.image_shape, each.dataset.shown),
            each.dataset.image_shape,
            each.device,
        )
        for each in trained
    ]
    with in_evaluation_mode(*(each.model for each in trained)):
        tested = _Tested(trained, classifiers, batch_size)
        found = _one(tested) if len(trained) == 1 else _several(tested, greedy)
        if calibrate:
            found["calibration"] = _calibrated(tested, views)
    return found | _seen(views, classifiers)


@dataclass(frozen=True)
class _Tested:
    trained: list[Trained]
    classifiers: list[ViewedClassifier]
    batch_size: int

    @property
    def labels(self) -> Tensor:
        return self.trained[0].dataset.test.labels

    def figures(self, found: Evaluation) -> dict[str, Any]:
        return {
            "data": self.trained[0].dataset.name,
            "images": found.images,
            "test_loss": found.loss,
            "test_top1": found.top1,
            "test_top1_interval": list(found.top1_interval),
            "test_top5": found.top5,
            "test_balanced_accuracy": found.balanced_accuracy,
            "per_class": found.class_figures,
            "confused": found.confused(),
        }


def _one(tested: _Tested) -> dict[str, Any]:
    (only,), (classifier,) = tested.trained, tested.classifiers
    classes, batch_size = only.dataset.classes, tested.batch_size
    if classifier.views.plain:  # the very numbers that training reported
        found = evaluate_model(
            only.model, only.dataset.test, classes=classes, batch_size=batch_size, device=only.device
        )
    else:
        scores = log_probabilities([classifier.probabilities])
        found = evaluate_scores(scores, tested.labels, classes=classes, batch_size=batch_size)
    return {"weights": str(only.file), "model": only.model_name, **tested.figures(found)}


def _several(tested: _Tested, greedy: bool) -> dict[str, Any]:
    labels, classes = tested.labels, tested.trained[0].dataset.classes
    everything = torch.stack([_all(each, len(labels), tested.batch_size) for each in tested.classifiers])
    # Greedy selection has seen the even images, so only the odd ones are an unbiased test.
    counted = torch.arange(1 if greedy else 0, len(labels), 2 if greedy else 1)
    selected = list(range(len(everything)))
    if greedy:
        chosen_on = torch.arange(0, len(labels), 2)
        selected = greedy_selection(everything[:, chosen_on], labels[chosen_on])

    def together(members: list[int]) -> Evaluation:
        predictors = [
            lambda indices, member=member: everything[member][counted[indices]] for member in members
        ]
        return evaluate_scores(log_probabilities(predictors), labels[counted], classes=classes)

    members = [
        {"weights": str(each.file), "model": each.model_name, **_short(together([number]))}
        for number, each in enumerate(tested.trained)
    ]
    return {
        "weights": [str(each.file) for each in tested.trained],
        "model": f"ensemble of {len(selected)}",
        **tested.figures(together(selected)),
        "members": members,
        "selected": selected,
    }


def _calibrated(tested: _Tested, views: Views) -> dict[str, Any]:
    """Fit the temperature on the images with even numbers, and keep it if there is one network."""
    labels = tested.labels
    if len(labels) < 2:
        raise RequestError(
            "--calibrate takes one test image to find the temperature and one to judge it: give more"
        )
    together = average([_all(each, len(labels), tested.batch_size) for each in tested.classifiers])
    temperature = fit_temperature(together[::2], labels[::2])
    raw, others = together[1::2], labels[1::2]
    warm = tempered(raw, temperature)
    file = None
    if len(tested.trained) == 1:
        file = str(save_calibration(tested.trained[0].file, Calibration(temperature, views)))
    return {
        "temperature": temperature,
        "images": len(others),
        "loss": [_likelihood_loss(each, others) for each in (raw, warm)],
        "error": [calibration_error(each, others) for each in (raw, warm)],
        "answered": [asdict(each) for each in answered(warm, others)],
        "file": file,
    }


def _likelihood_loss(probabilities: Tensor, labels: Tensor) -> float:
    own = probabilities.double().gather(1, labels[:, None]).clamp_min(torch.finfo(torch.float32).tiny)
    return -float(own.log().mean())


def _all(classifier: ViewedClassifier, images: int, batch_size: int) -> Tensor:
    parts = [classifier.probabilities(indices).cpu() for indices in torch.arange(images).split(batch_size)]
    return torch.cat(parts)


def _short(found: Evaluation) -> dict[str, float]:
    return {"test_loss": found.loss, "test_top1": found.top1, "test_top5": found.top5}


def _seen(views: Views, classifiers: list[ViewedClassifier]) -> dict[str, Any]:
    if views.plain:
        return {}
    seen: dict[str, Any] = {"views": views.to_json()}
    if (views.dense or views.ten_crop or views.scales) and any(
        isinstance(each.split, HasWhole) for each in classifiers
    ):
        seen["region"] = "whole images; training used the center square"
    return seen | ({"dense": [each.method for each in classifiers]} if views.dense else {})


def _check_together(trained: list[Trained]) -> None:
    first = trained[0]
    for other in trained[1:]:
        same = first.dataset.classes == other.dataset.classes
        if not same or not torch.equal(first.dataset.test.labels, other.dataset.test.labels):
            raise RequestError(
                f"{other.path} was trained on {other.dataset.name} and {first.path} on {first.dataset.name}: "
                "an ensemble votes on the same images, give --data"
            )
