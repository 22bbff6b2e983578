"""The recipes that come with the project."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.roles.job import CheckpointConfig

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
SMALL = {"model": "deep_image(width=8, hidden=8)", "image_size": 28, "scale": 32}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(8):
        path = folder / ("test" if number > 3 else "train") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 50, 3), 30 * number, dtype=np.uint8)).save(path)
    return str(folder)


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_is_a_job(path: Path, photographs: str) -> None:
    """With pictures of the test's own where it takes a user's, those networks small, and no weights fetched."""
    told = read_recipe(path)
    own = {"data": photographs} if told["data"] == "photos/" else {"data": "digits"}
    if told["model"] in ("deep_image", "lenet5"):
        own |= SMALL if told["model"] == "deep_image" else {"image_size": 28}
    if "weights" in told:
        own |= {"weights": None}
    made = assemble(configure(told, own), CheckpointConfig())
    assert made.workers == told["workers"]
    assert made.learning.epochs == told["epochs"]
    if "scale" in told:
        assert str(made.learning.transform).startswith("window(")
