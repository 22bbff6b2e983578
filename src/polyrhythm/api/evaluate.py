"""Testing a trained model, as the verb `evaluate` does it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyrhythm.config.assemble import device_from, model_maker, name_of
from polyrhythm.config.recipe import CONFIG_FILE, read_recipe
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import evaluate as evaluate_model
from polyrhythm.models.weights import read_metadata

MODEL_FILE = "model.safetensors"


def evaluate(
    weights: str | Path,
    *,
    data: Any = None,
    model: Any = None,
    batch_size: int = 500,
    device: str = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Tests a model on the test images of some data.

    Args:
        weights: a run folder or a file of weights.
        data: what to test on; None: what the run was trained on.
        model: the network; None: the run's.
        batch_size: images at a time.
        device: `cpu`, `cuda` or `auto`.
        **options: `image_size` and `skip_unreadable`, as for `train`.

    Returns:
        `weights`, `data`, `model`, `images`, `test_loss`, `test_top1`, `test_top5` (fractions) and `per_class`.

    Raises:
        RequestError: something in the request is wrong.
    """
    path = Path(weights)
    known = _known(path)
    data = data if data is not None else known.get("data")
    model = model if model is not None else known.get("model")
    if data is None or model is None:
        missing = "--data" if data is None else "--model"
        raise RequestError(f"{path} does not say what it was trained with: give {missing}")
    size = options.get("image_size") or known.get("image_size")
    dataset = open_data(data, image_size=size, skip_unreadable=bool(options.get("skip_unreadable")))
    file = path / MODEL_FILE if path.is_dir() else path
    place = device_from(device)
    replica = model_maker(model, dataset, str(file))().to(place)
    found = evaluate_model(
        replica, dataset.test, classes=dataset.classes, batch_size=batch_size, device=place
    )
    return {
        "weights": str(file),
        "data": dataset.name,
        "model": name_of(model),
        "images": found.images,
        "test_loss": found.loss,
        "test_top1": found.top1,
        "test_top5": found.top5,
        "per_class": [asdict(entry) for entry in found.per_class],
    }


def _known(path: Path) -> dict[str, Any]:
    """Gives what a run folder or the weights themselves say of how they were trained."""
    if not path.exists():
        raise RequestError(f"there is no {path}: name a run folder or a file of weights")
    if path.is_dir():
        if not (path / MODEL_FILE).is_file():
            if not (path / CONFIG_FILE).is_file():
                raise RequestError(f"{path} is no run folder: name one, or a file of weights")
            raise RequestError(
                f"{path} holds no {MODEL_FILE}: the run has not ended; continue it with --resume {path}"
            )
        return read_recipe(path / CONFIG_FILE) if (path / CONFIG_FILE).is_file() else {}
    return dict(read_metadata(path)) if path.suffix == ".safetensors" else {}
