"""Exported networks for pictures of other sizes: dense, and by global pooling; ONNX by onnxruntime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm
from polyrhythm.api.served import load_served
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.dense import SlidingWindows
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights

FACTS = {"classes": "cat\ndog\nfish", "black": "-1,-1,-1", "white": "1,1,1"}
SUFFIXES = [".pt", ".onnx"]


def _saved(folder: Path, spec: str, side: int) -> Path:
    torch.manual_seed(0)
    model = create_model(spec, classes=3, image_shape=(3, side, side))
    save_weights(model, folder / "w.safetensors", {"model": spec, "image_shape": f"3,{side},{side}", **FACTS})
    return folder / "w.safetensors"


def _answers(path: Path, pictures: Tensor) -> Tensor:
    """What a program without this project gets from the file."""
    if path.suffix == ".onnx":
        session: Any = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        return torch.from_numpy(session.run(["probabilities"], {"pictures": pictures.numpy()})[0])
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        found: Tensor = torch.jit.load(str(path))(pictures)
    return found


def _needs(suffix: str) -> None:
    if suffix == ".onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(name)


def _pictures(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_dense_file_is_the_mean_over_all_windows(suffix: str, tmp_path: Path) -> None:
    _needs(suffix)
    weights = _saved(tmp_path, "lenet5(widths=[4, 4], hidden=8)", 16)
    found = polyrhythm.export(weights, tmp_path / f"model{suffix}", dense=True)
    assert (found["dense"], found["any_size"]) == (True, True)
    network = load_served(weights, device="cpu").network
    for size in ((16, 16), (20, 28), (31, 18)):
        pictures = _pictures(2, 3, *size)
        # Two poolings of two: the network moves by four pixels.
        windows = SlidingWindows(network.model, (16, 16), 4)
        inside = pictures[:, :, : 16 + (size[0] - 16) // 4 * 4, : 16 + (size[1] - 16) // 4 * 4]
        expected = windows(inside / 255 * 2 - 1).softmax(1)
        torch.testing.assert_close(
            _answers(tmp_path / f"model{suffix}", pictures), expected, atol=1e-5, rtol=0
        )


def test_a_network_with_a_global_pooling_takes_any_size(tmp_path: Path) -> None:
    weights = _saved(tmp_path, "timm.resnet10t", 32)
    polyrhythm.export(weights, tmp_path / "model.pt", any_size=True)
    network = load_served(weights, device="cpu").network
    for size in ((32, 32), (47, 33)):
        pictures = _pictures(1, 3, *size)
        torch.testing.assert_close(
            _answers(tmp_path / "model.pt", pictures), network(pictures), atol=1e-5, rtol=0
        )


def test_what_a_network_cannot_be_is_said(tmp_path: Path) -> None:
    weights = _saved(tmp_path, "lenet5(widths=[4, 4], hidden=8)", 16)
    with pytest.raises(
        RequestError, match="accepts images of 16 by 16 only: leave --any-size out, or give --dense"
    ):
        polyrhythm.export(weights, tmp_path / "model.pt2", any_size=True)
    with pytest.raises(RequestError, match=r"supports images of one size: name an \.onnx or a \.pt file"):
        polyrhythm.export(weights, tmp_path / "model.pt2", dense=True)
    assert not (tmp_path / "model.pt2").exists()
