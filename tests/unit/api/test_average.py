"""The verb `average`: soups, and the mean of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import polyrhythm
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights
from polyrhythm.training.checkpoint import checkpoint_path, save_checkpoint
from polyrhythm.training.flat_parameters import FlatParameters


def _saved(folder: Path, name: str, seed: int, spec: str = "mlp") -> Path:
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.safetensors"
    save_weights(
        create_model(spec, classes=10, image_shape=(1, 8, 8)), path, {"model": spec, "data": "digits"}
    )
    return path


def test_a_soup_is_the_mean_of_the_weights(tmp_path: Path) -> None:
    paths = [_saved(tmp_path, str(seed), seed) for seed in range(3)]
    found = polyrhythm.average(paths, tmp_path / "soup.safetensors")
    soup, parts = load_file(found["file"]), [load_file(path) for path in paths]
    for name, value in soup.items():
        torch.testing.assert_close(value, torch.stack([part[name] for part in parts]).mean(0))
    assert found["test_top1"] == polyrhythm.evaluate(found["file"])["test_top1"]


def test_one_run_stands_for_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _saved(run, "model", 0)
    (run / "config.yaml").write_text("model: mlp\ndata: digits\n")
    (run / "checkpoints").mkdir()
    expected = []
    for step in (10, 20):
        torch.manual_seed(step)
        model = create_model("mlp", classes=10, image_shape=(1, 8, 8))
        expected.append(model[1].weight.detach().clone())
        vector = FlatParameters(model).vector
        save_checkpoint(checkpoint_path(run / "checkpoints", step), {"parameters": vector}, {})
    found = polyrhythm.average(run, tmp_path / "mean.safetensors")
    assert found["averaged"] == ["step-00000010", "step-00000020"]
    torch.testing.assert_close(load_file(found["file"])["1.weight"], torch.stack(expected).mean(0))


def test_statistics_of_batch_norms_are_those_of_the_soup(tmp_path: Path) -> None:
    spec = "deep_image(width=8, hidden=8, batch_norm=True)"
    paths = [_saved(tmp_path, str(seed), seed, spec) for seed in range(2)]
    found = polyrhythm.average(paths, tmp_path / "soup.safetensors")
    soup, train = load_file(found["file"]), open_data("digits").train
    with torch.no_grad():
        first = torch.nn.functional.conv2d(
            train.images(torch.arange(len(train))), soup["0.weight"], soup["0.bias"], padding=1
        )
    torch.testing.assert_close(soup["1.running_mean"], first.mean((0, 2, 3)), rtol=0.02, atol=0.01)


def test_a_greedy_soup_leaves_out_what_harms(tmp_path: Path) -> None:
    good = _saved(tmp_path, "good", 0)
    dataset = open_data("digits")
    model = create_model("mlp", classes=10, image_shape=(1, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        images, labels = dataset.train.images(torch.arange(len(dataset.train))), dataset.train.labels
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    save_weights(model, good, {"model": "mlp", "data": "digits"})
    bad = _saved(tmp_path, "bad", 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-20)
    save_weights(model, bad, {"model": "mlp", "data": "digits"})
    found = polyrhythm.average([bad, good], tmp_path / "soup.safetensors", greedy=True)
    assert found["averaged"] == [str(good)]
    assert found["images"] == len(dataset.test) // 2
    assert torch.equal(load_file(found["file"])["1.weight"], load_file(good)["1.weight"])


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    first, other = _saved(tmp_path, "a", 0), _saved(tmp_path, "b", 0, "mlp(hidden=8)")
    with pytest.raises(RequestError, match="only one network's weights can be averaged"):
        polyrhythm.average([first, other], tmp_path / "c.safetensors")
    with pytest.raises(RequestError, match="fewer than two checkpoints"):
        polyrhythm.average(first, tmp_path / "c.safetensors")
    with pytest.raises(RequestError, match="exists: name another file"):
        polyrhythm.average([first, first], other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
