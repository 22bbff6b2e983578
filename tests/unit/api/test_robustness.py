"""Accuracy on ever worse pictures."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import polyrhythm
from polyrhythm.api.robustness import FACTORS, declines
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights


class _Light(nn.Module):
    """Takes pictures for class 1 that are brighter than a half."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        light = images.mean((1, 2, 3)) - 0.5
        return torch.stack([-light, light], 1)


@pytest.fixture
def dataset() -> Dataset:
    tones = torch.linspace(0.05, 0.95, 20)
    images = tones[:, None, None, None].expand(20, 3, 16, 16).clone()
    split = TensorSplit(images, (tones > 0.5).long())
    return Dataset("tones", split, split, ("dark", "light"), (3, 16, 16), 1)


def test_accuracy_falls_where_it_must_and_only_there(dataset: Dataset) -> None:
    clean, found = declines(_Light(), dataset, torch.arange(20))
    by_name = {each.name: each for each in found}
    assert clean == 1.0
    brighter = [
        sum(0 if 0.05 + k * 0.9 / 19 + add > 0.5 else 1 for k in range(10))
        for add in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    assert by_name["brightness"].top1 == pytest.approx([(10 + dark) / 20 for dark in brighter])
    assert by_name["contrast"].top1 == (1.0,) * 5  # a flat picture has no contrast to lose
    assert by_name["pixelate"].top1 == (1.0,) * 5
    assert by_name["vignetting"].top1[4] < 1.0
    assert {each.kind for each in found[:3]} == {"augmentation"}


def test_augmentations_go_through_their_usual_strength(dataset: Dataset) -> None:
    _, found = declines(_Light(), dataset, torch.arange(4))
    strengths = {each.name: each.strengths for each in found}
    assert strengths["rotation"] == tuple(15 * factor for factor in FACTORS)
    assert strengths["color_casting"] == (5, 10, 20, 30, 40)
    assert max(strengths["lens_distortion"]) < 1 / 3
    assert max(strengths["vignetting"]) == 1.0
    assert "flip" not in strengths


def test_the_same_pictures_suffer_the_same_each_time(dataset: Dataset) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 2))
    indices = torch.arange(20)
    first = declines(model, dataset, indices)
    torch.manual_seed(1)
    assert declines(model, dataset, indices) == first


def test_the_verb_tests_each_model_and_draws_it(tmp_path: Path) -> None:
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = create_model("mlp", classes=10, image_shape=(1, 8, 8))
        files.append(tmp_path / f"{seed}.safetensors")
        save_weights(model, files[-1], {"model": "mlp", "data": "digits"})
    found = polyrhythm.robustness(files, images=20, plot=tmp_path / "page.html")
    assert [model["weights"] for model in found["models"]] == [str(file) for file in files]
    assert found["images"] == 20
    first = found["models"][0]["declines"]
    assert "color_casting" not in {each["name"] for each in first}  # digits are gray
    page = (tmp_path / "page.html").read_text()
    drawn = json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', page)[1])
    assert len(drawn) == len(first)
    strips = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(strips) == len(first)
    names = [each["name"] for each in first]
    brightness = np.asarray(Image.open(BytesIO(b64decode(strips[names.index("brightness")]))))
    assert brightness.shape == (96, 6 * 96)  # as it is, and at five severities
    means = brightness.reshape(96, 6, 96).mean((0, 2))
    assert (np.diff(means) > 5).all()
    assert drawn[0]["data"][1]["y"] == [
        found["models"][1]["clean_top1"],
        *found["models"][1]["declines"][0]["top1"],
    ]
    with pytest.raises(RequestError, match="there is no folder"):
        polyrhythm.robustness(files, plot=tmp_path / "nowhere" / "page.html")


def test_only_the_kinds_that_were_named_are_tested(dataset: Dataset) -> None:
    _, every = declines(_Light(), dataset, torch.arange(20))
    _, found = declines(_Light(), dataset, torch.arange(20), kinds=["vignetting", "contrast"])
    assert found == [each for each in every if each.name in ("vignetting", "contrast")]
    with pytest.raises(RequestError, match=r"unknown kind of change 'vigneting': did you mean vignetting"):
        declines(_Light(), dataset, torch.arange(20), kinds=["vigneting"])


def test_several_are_tested_together_and_summed_up(tmp_path: Path) -> None:
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = create_model("mlp", classes=10, image_shape=(1, 8, 8))
        files.append(tmp_path / f"{seed}.safetensors")
        save_weights(model, files[-1], {"model": "mlp", "data": "digits"})
    found = polyrhythm.robustness(
        files, images=200, kinds=["contrast", "rotation"], plot=tmp_path / "page.html"
    )
    for each in (*found["models"], found["together"]):
        (contrast,) = [decline for decline in each["declines"] if decline["kind"] == "corruption"]
        assert each["corrupted_top1"] == pytest.approx(sum(contrast["top1"]) / 5)
    both = polyrhythm.evaluate(files)["test_top1"]
    whole = polyrhythm.robustness(files, images=100_000, kinds=["contrast"])
    assert whole["together"]["clean_top1"] == pytest.approx(both)
    assert "together: " in (tmp_path / "page.html").read_text()
    alone = polyrhythm.robustness(files[0], images=20, kinds=["rotation"])
    assert alone["together"] is None
    assert alone["models"][0]["corrupted_top1"] is None
