"""Networks as files for other programs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.api.served import Normalized, Preprocessing
from polyrhythm.errors import RequestError, RunError
from polyrhythm.models.create import create_model
from polyrhythm.models.exporting import FACTS_FILE, export

SHAPE = (1, 8, 8)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    model = create_model("lenet5", classes=4, image_shape=SHAPE)
    return Normalized(model, Preprocessing(SHAPE, (-0.3,), (0.7,))).eval()


def _pictures(images: int) -> torch.Tensor:
    return torch.randint(256, (images, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def _opened(path: Path) -> tuple[Any, dict[str, Any]]:
    extra = {FACTS_FILE: ""}
    if path.suffix == ".pt":
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            module = torch.jit.load(str(path), _extra_files=extra)
    else:
        module = torch.export.load(str(path), extra_files=extra).module()
    return module, json.loads(extra[FACTS_FILE])


@pytest.mark.parametrize(("suffix", "name"), [(".pt", "torchscript"), (".pt2", "exported_program")])
def test_the_file_alone_gives_the_probabilities_of_any_number_of_pictures(
    network: nn.Module, tmp_path: Path, suffix: str, name: str
) -> None:
    path = tmp_path / f"model{suffix}"
    found = export(network, SHAPE, path, {"classes": ["a", "b", "c", "d"]})
    assert found.format == name
    assert found.largest_difference < 1e-5
    module, facts = _opened(path)
    assert facts == {"classes": ["a", "b", "c", "d"]}
    for images in (1, 7):
        pictures = _pictures(images)
        with torch.no_grad():
            expected = network.model(pictures / 255 - 0.3).softmax(1)
        torch.testing.assert_close(module(pictures), expected)


def test_a_network_that_comes_out_different_is_not_kept(tmp_path: Path) -> None:
    class Fickle(nn.Module):
        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return pictures.flatten(1).float() + (1.0 if len(pictures) == 3 else 0.0)

    with pytest.raises(RunError, match="gives other outputs"):
        export(Fickle().eval(), SHAPE, tmp_path / "model.pt", {})
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class Undecided(nn.Module):
        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return pictures.float() if pictures.float().mean().item() > 0 else pictures.flatten(1).float()

    with pytest.raises(RunError, match="cannot be written as exported_program"):
        export(Undecided().eval(), SHAPE, tmp_path / "model.pt2", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_a_full_disk_is_a_failure_and_not_an_abort(network: nn.Module, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"full{suffix}"
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match=rf"^cannot write .*full{suffix}: No space left on device$"):
        export(network, SHAPE, path, {})
    assert not path.is_symlink()


def test_unknown_endings_and_missing_packages_are_refused(
    network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        RequestError, match=r"one of \.onnx \(onnx\), \.pt \(torchscript\), \.pt2 \(exported_program\)"
    ):
        export(network, SHAPE, tmp_path / "model.h5", {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        RequestError, match=r"takes onnx and onnxscript: pip install 'polyrhythm\[onnx\]', or"
    ):
        export(network, SHAPE, tmp_path / "model.onnx", {})
    assert not list(tmp_path.iterdir())
