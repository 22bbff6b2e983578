"""The verb `evaluate` with views, and on several models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyrhythm
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights


def _saved(folder: Path, name: str, seed: int, spec: str = "mlp", data: str = "digits") -> str:
    torch.manual_seed(seed)
    model = create_model(spec, classes=10, image_shape=(1, 8, 8))
    path = folder / f"{name}.safetensors"
    save_weights(model, path, {"model": spec, "data": data})
    return str(path)


def _probabilities(path: str, spec: str) -> torch.Tensor:
    dataset = open_data("digits")
    model = create_model(spec, classes=10, image_shape=(1, 8, 8))
    model.load_state_dict(polyrhythm_weights(path))
    with torch.no_grad():
        return model(dataset.test.images(torch.arange(len(dataset.test)))).softmax(1)


def polyrhythm_weights(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_several_models_vote(tmp_path: Path) -> None:
    first, second = _saved(tmp_path, "a", 1), _saved(tmp_path, "b", 2, "mlp(hidden=16)")
    found = polyrhythm.evaluate([first, second], batch_size=100)
    mean = (_probabilities(first, "mlp") + _probabilities(second, "mlp(hidden=16)")) / 2
    labels = open_data("digits").test.labels
    assert found["test_top1"] == pytest.approx((mean.argmax(1) == labels).double().mean().item(), abs=1e-12)
    loss = -mean.gather(1, labels[:, None]).log().double().mean().item()
    assert found["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["weights"] == [first, second]
    assert [each["model"] for each in found["members"]] == ["mlp", "mlp(hidden=16)"]
    assert found["members"][1]["test_top1"] == polyrhythm.evaluate(second)["test_top1"]
    assert found["selected"] == [0, 1]


def test_a_greedy_choice_is_tested_on_the_other_images(tmp_path: Path) -> None:
    first, second = _saved(tmp_path, "a", 1), _saved(tmp_path, "b", 2)
    found = polyrhythm.evaluate([first, second], greedy=True)
    assert found["images"] == len(open_data("digits").test) // 2
    labels, right = open_data("digits").test.labels[::2], []
    for path in (first, second):
        right.append((_probabilities(path, "mlp")[::2].argmax(1) == labels).double().mean().item())
    assert found["selected"][0] == right.index(max(right))


def test_views_of_small_pictures(tmp_path: Path) -> None:
    path = _saved(tmp_path, "a", 1, "lenet5")
    found = polyrhythm.evaluate(path, dense=True, flip=True, scales=[8, 12])
    assert found["dense"] == ["convolutional"]
    assert found["views"] == {"dense": True, "ten_crop": False, "flip": True, "scales": [8, 12]}
    assert 0 <= found["test_top1"] <= 1
    plain = polyrhythm.evaluate(path)
    assert "views" not in plain
    assert polyrhythm.evaluate(path, dense=True, scales=[8])["test_top1"] == plain["test_top1"]


def test_requests_that_cannot_be(tmp_path: Path) -> None:
    first = _saved(tmp_path, "a", 1)
    with pytest.raises(RequestError, match="name more than one"):
        polyrhythm.evaluate(first, greedy=True)
    with pytest.raises(RequestError, match="give one of them"):
        polyrhythm.evaluate(first, dense=True, ten_crop=True)
    images, labels = torch.rand(12, 1, 8, 8), torch.arange(12) % 10
    other = ((images, labels), (images, labels))
    alone = polyrhythm.evaluate(first, data=other)
    assert alone["images"] == 12
