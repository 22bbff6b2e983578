"""Networks that were trained at scales of their own, tested alone and together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import polyrhythm
from polyrhythm.config.recipe import CONFIG_FILE, configure, write_recipe
from polyrhythm.data.images import NORMALIZATIONS
from polyrhythm.data.open import open_data
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights

SPEC = "lenet5(widths=[4, 4], hidden=8)"
SIZE = 16


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    numbers = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "photos" / ("test" if number > 5 else "train") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(numbers.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        coarse.resize((70, 50), Image.Resampling.BICUBIC).save(path)
    return tmp_path / "photos"


def _run(photographs: Path, scale: int) -> Path:
    folder = photographs.parent / str(scale)
    folder.mkdir()
    values = {"data": str(photographs), "model": SPEC, "image_size": SIZE, "scale": scale}
    write_recipe(configure(values), folder / CONFIG_FILE)
    save_weights(_network(scale), folder / "model.safetensors", {"model": SPEC})
    return folder


def _network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return create_model(SPEC, classes=2, image_shape=(3, SIZE, SIZE)).eval()


def _middle(photographs: Path, scale: int) -> torch.Tensor:
    """Probabilities of the middle of every test picture, whose middle square is scaled by Pillow."""
    first, seen = (scale - SIZE) // 2, []
    for path in sorted((photographs / "test").glob("*/*.png")):
        square = Image.open(path).resize((scale, scale), Image.Resampling.BILINEAR, box=(10, 0, 60, 50))
        window = np.array(square)[first : first + SIZE, first : first + SIZE]
        seen.append(NORMALIZATIONS["imagenet"](torch.from_numpy(window.copy())[None])[0])
    with torch.no_grad():
        return _network(scale)(torch.stack(seen)).softmax(1)


def test_each_member_of_an_ensemble_sees_pictures_at_its_own_scale(photographs: Path) -> None:
    together = polyrhythm.evaluate([_run(photographs, 20), _run(photographs, 40)])
    mean = (_middle(photographs, 20) + _middle(photographs, 40)) / 2
    labels = open_data(str(photographs), image_size=SIZE).test.labels
    loss = -mean.gather(1, labels[:, None]).log().mean().item()
    assert together["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_dense_evaluation_is_at_the_scale_of_training(photographs: Path) -> None:
    run = _run(photographs, 40)
    assert (
        polyrhythm.evaluate(run, dense=True)["test_loss"]
        == polyrhythm.evaluate(run, dense=True, scales=[40])["test_loss"]
    )
    assert (
        polyrhythm.evaluate(run, dense=True)["test_loss"]
        != polyrhythm.evaluate(run, dense=True, scales=[20])["test_loss"]
    )


def test_a_picture_in_use_is_seen_at_the_scale_of_training(photographs: Path) -> None:
    told = {
        "classes": "a\nb",
        "image_shape": f"3,{SIZE},{SIZE}",
        "black": "0,0,0",
        "white": "1,1,1",
        "shown": "0.4",
    }
    weights = photographs.parent / "w.safetensors"
    save_weights(_network(1), weights, {"model": SPEC, **told})
    picture = photographs / "train" / "a" / "0.png"
    found = polyrhythm.predict(picture, weights, top=1)["images"][0]["classes"][0]
    pixels = Image.open(picture).resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(25, 15, 45, 35))
    numbers = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        assert found["probability"] == pytest.approx(_network(1)(numbers).softmax(1).max().item(), abs=1e-5)
