"""Naming what pictures show, and files for other programs."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polyrhythm
from polyrhythm.api.served import load_served
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.weights import save_weights

FACTS = {"classes": "cat\ndog\nfish", "image_shape": "3,16,16", "black": "-1,-1,-1", "white": "1,1,1"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPEC = "lenet5(widths=[4, 4], hidden=8)"


def _saved(path: Path, seed: int = 0, **facts: str) -> Path:
    torch.manual_seed(seed)
    model = create_model(SPEC, classes=3, image_shape=(3, 16, 16))
    save_weights(model, path, {"model": SPEC, "data": "gone", **FACTS, **facts})
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "pictures" / "a.png"
    path.parent.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def _by_hand(picture: Path, seed: int) -> torch.Tensor:
    """The center that a network sees, 7/8 of the shorter side, from -1 to 1."""
    box = (12.5, 2.5, 47.5, 37.5)
    pixels = Image.open(picture).resize((16, 16), Image.Resampling.BILINEAR, box=box)
    torch.manual_seed(seed)
    model = create_model(SPEC, classes=3, image_shape=(3, 16, 16)).eval()
    numbers = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float() / 255 * 2 - 1
    with torch.no_grad():
        return model(numbers).softmax(1)[0]


def test_the_likeliest_classes_without_the_data(tmp_path: Path, picture: Path) -> None:
    found = polyrhythm.predict(picture, _saved(tmp_path / "w.safetensors"), top=2)
    expected = _by_hand(picture, 0)
    names = ("cat", "dog", "fish")
    (entry,) = found["images"]
    assert entry["image"] == str(picture)
    assert [each["class"] for each in entry["classes"]] == [names[i] for i in expected.topk(2).indices]
    assert [each["probability"] for each in entry["classes"]] == pytest.approx(
        expected.topk(2).values.tolist(), abs=1e-5
    )


def test_several_networks_stand_side_by_side_and_vote(tmp_path: Path, picture: Path) -> None:
    files = [_saved(tmp_path / f"{seed}.safetensors", seed) for seed in (0, 1)]
    (entry,) = polyrhythm.predict([picture], files, top=20)["images"]
    each = [_by_hand(picture, seed) for seed in (0, 1)]
    for row, expected in zip(entry["networks"], each, strict=True):
        assert [one["probability"] for one in row] == pytest.approx(
            expected.sort(descending=True).values.tolist(), abs=1e-5
        )
    together = (each[0] + each[1]) / 2
    assert entry["classes"][0]["probability"] == pytest.approx(float(together.max()), abs=1e-5)


def test_a_folder_stands_for_its_files(tmp_path: Path, picture: Path) -> None:
    (picture.parent / "b.png").write_bytes(picture.read_bytes())
    (picture.parent / ".hidden").write_text("x")
    found = polyrhythm.predict(picture.parent, _saved(tmp_path / "w.safetensors"))
    assert [entry["image"] for entry in found["images"]] == [str(picture), str(picture.with_name("b.png"))]


def test_a_grey_network_sees_grey(tmp_path: Path, picture: Path) -> None:
    path = tmp_path / "gray.safetensors"
    torch.manual_seed(0)
    model = create_model("mlp", classes=10, image_shape=(1, 8, 8))
    save_weights(
        model, path, {"model": "mlp", "data": "digits"}
    )  # an older file, which does not say its tones
    (entry,) = polyrhythm.predict(picture, path)["images"]
    assert len(entry["classes"]) == 5
    assert {each["class"] for each in entry["classes"]} <= set("0123456789")


def test_requests_that_cannot_be(tmp_path: Path, picture: Path) -> None:
    path = _saved(tmp_path / "w.safetensors")
    with pytest.raises(RequestError, match="there is no image"):
        polyrhythm.predict(tmp_path / "gone.png", path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="there are no images"):
        polyrhythm.predict(tmp_path / "empty", path)
    with pytest.raises(RequestError, match=r"w\.safetensors cannot be read \(not an image\)"):
        polyrhythm.predict(path, path)
    other = _saved(tmp_path / "o.safetensors", classes="cat\ndog\nbird")
    with pytest.raises(RequestError, match="know different classes"):
        polyrhythm.predict(picture, [path, other])


def test_folders_without_images_and_dangling_links_are_named(tmp_path: Path, picture: Path) -> None:
    weights = _saved(tmp_path / "w.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"there are no images in .*empty: name files"):
        polyrhythm.predict([picture, tmp_path / "empty"], weights)
    (picture.parent / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(RequestError, match=r"gone\.png cannot be read"):
        polyrhythm.predict(picture.parent, weights)
    found = polyrhythm.predict(picture.parent, weights, skip_unreadable=True)
    assert [entry["image"] for entry in found["images"]] == [str(picture)]


def test_of_a_folder_its_pictures_are_looked_at_wherever_they_lie(tmp_path: Path, picture: Path) -> None:
    path = _saved(tmp_path / "w.safetensors")
    folder = tmp_path / "holiday"
    (folder / "beach").mkdir(parents=True)
    picture.rename(folder / "beach" / picture.name)
    (folder / "notes.txt").write_text("sunny")
    (folder / ".hidden.png").write_text("no picture")
    (entry,) = polyrhythm.predict(folder, path)["images"]
    assert entry["image"] == str(folder / "beach" / picture.name)


def test_a_broken_picture_is_named_with_what_helps_here(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(
        RequestError,
        match=r"broken\.jpg cannot be read \(not an image\): repair it, or leave it out, with --skip-unreadable$",
    ):
        polyrhythm.predict(tmp_path, _saved(tmp_path / "w.safetensors"))


def test_an_exported_file_gives_what_predict_gives(tmp_path: Path, picture: Path) -> None:
    path = _saved(tmp_path / "w.safetensors")
    found = polyrhythm.export(path, tmp_path / "model.pt2")
    assert found["classes"] == ["cat", "dog", "fish"]
    pixels = Image.open(picture).resize((16, 16), Image.Resampling.BILINEAR, box=(12.5, 2.5, 47.5, 37.5))
    pictures = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
    probabilities = torch.export.load(found["file"]).module()(pictures)
    (entry,) = polyrhythm.predict(picture, path)["images"]
    assert float(probabilities.max()) == pytest.approx(entry["classes"][0]["probability"], abs=1e-5)
    with pytest.raises(RequestError, match="exists: name another file"):
        polyrhythm.export(path, tmp_path / "model.pt2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight pictures of two shapes in three classes, of which the weights of `_saved` know the names."""
    generator = np.random.default_rng(1)
    for split in ("train", "test"):
        for number in range(12):
            place = tmp_path / "photos" / split / ("cat", "dog", "fish")[number % 3]
            place.mkdir(parents=True, exist_ok=True)
            size = (40, 60, 3) if number % 2 else (36, 36, 3)
            pixels = generator.integers(0, 256, size, dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path / "photos"


IMAGENET = {
    "black": ",".join(str(-mean / std) for mean, std in zip(MEAN, STD, strict=True)),
    "white": ",".join(str((1 - mean) / std) for mean, std in zip(MEAN, STD, strict=True)),
}
VIEWS: list[dict[str, Any]] = [
    {},
    {"flip": True},
    {"dense": True},
    {"ten_crop": True},
    {"dense": True, "flip": True, "scales": [18, 20]},
]


@pytest.mark.parametrize("views", VIEWS, ids=str)
def test_what_evaluate_did_predict_does(views: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    files = [_saved(tmp_path / f"{seed}.safetensors", seed, **IMAGENET) for seed in (0, 1)]
    tested = polyrhythm.evaluate(files, data=str(folder), image_size=16, **views)
    named = polyrhythm.predict(folder / "test", files, top=3, **views)
    right, loss = 0, 0.0
    for entry in named["images"]:
        label = Path(entry["image"]).parent.name
        right += entry["classes"][0]["class"] == label
        loss -= math.log(next(each["probability"] for each in entry["classes"] if each["class"] == label))
    assert len(named["images"]) == tested["images"] == 12
    assert right / 12 == pytest.approx(tested["test_top1"])
    assert loss / 12 == pytest.approx(tested["test_loss"], rel=1e-5)
    assert named.get("dense") == tested.get("dense")


def test_calibrated_probabilities_and_none_of_these(tmp_path: Path, folder: Path) -> None:
    path = _saved(tmp_path / "w.safetensors", **IMAGENET)
    found = polyrhythm.evaluate(path, data=str(folder), image_size=16, calibrate=True)["calibration"]
    raw = polyrhythm.predict(folder / "test", path, temperature=1.0, top=3)
    warm = polyrhythm.predict(folder / "test", path, top=3, none_below=0.4)
    assert warm["temperatures"] == [found["temperature"]]
    assert found["temperature"] != 1
    for one, other in zip(raw["images"], warm["images"], strict=True):
        powers = [each["probability"] ** (1 / found["temperature"]) for each in one["classes"]]
        shares = [each["probability"] for each in other["classes"]]
        assert shares == pytest.approx([power / sum(powers) for power in powers], abs=1e-5)
        assert other["none_of_these"] == (shares[0] < 0.4)
        assert not one["none_of_these"]
    # Other views have other probabilities, for which nothing is known.
    assert polyrhythm.predict(folder / "test", path, flip=True)["temperatures"] == [1.0]
    exported = polyrhythm.export(path, tmp_path / "model.pt2")
    picture = next((folder / "test" / "cat").iterdir())
    pixels = torch.from_numpy(load_served(path).preprocessing.read(picture).numpy())[None]
    probabilities = torch.export.load(exported["file"]).module()(pixels)
    (entry,) = polyrhythm.predict(picture, path)["images"]
    assert float(probabilities.max()) == pytest.approx(entry["classes"][0]["probability"], abs=1e-5)


def test_a_table_and_json_as_files(tmp_path: Path, folder: Path) -> None:
    path = _saved(tmp_path / "w.safetensors")
    (folder / "test" / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(RequestError, match=r"broken\.jpg cannot be read \(not an image\)"):
        polyrhythm.predict(folder / "test", path)
    told: list[tuple[int, int]] = []
    found = polyrhythm.predict(
        folder / "test",
        path,
        out=tmp_path / "found.csv",
        top=2,
        skip_unreadable=True,
        progress=lambda done, every: told.append((done, every)),
    )
    assert told == [(12, 12)]
    assert [entry["reason"] for entry in found["unreadable"]] == ["not an image"]
    with (tmp_path / "found.csv").open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == ["image", "none_of_these", "class", "probability", "class_2", "probability_2"]
    assert [row["image"] for row in rows] == [entry["image"] for entry in found["images"]]
    assert [row["class_2"] for row in rows] == [entry["classes"][1]["class"] for entry in found["images"]]
    again = polyrhythm.predict(folder / "test", path, skip_unreadable=True, out=tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == again


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"out": "found.txt"}, r"name it \.csv or \.json"),
        ({"out": "nowhere/found.csv"}, "there is no folder nowhere"),
        ({"temperature": 0.0}, "temperature 0 is none: give 0.05 to 20"),
        ({"none_below": 1.5}, "none_below 1.5 is no probability"),
        ({"scales": [8]}, "scale 8 is below the 16 pixels"),
        ({"dense": True, "ten_crop": True}, "give one of them"),
        ({"flop": True}, "unknown option 'flop'"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], complaint: str, tmp_path: Path, picture: Path
) -> None:
    with pytest.raises(RequestError, match=complaint):
        polyrhythm.predict(picture, _saved(tmp_path / "w.safetensors"), **options)


def test_views_of_more_than_training_saw_say_so(tmp_path: Path, folder: Path) -> None:
    path = _saved(tmp_path / "w.safetensors", **IMAGENET)
    dense = polyrhythm.evaluate(path, data=str(folder), image_size=16, dense=True)
    assert dense["region"] == "whole images; training used the center square"
    assert "region" not in polyrhythm.evaluate(path, data=str(folder), image_size=16, flip=True)
