"""The image size of files where none is given, in the configuration of every run."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from torch import nn

import polyrhythm
from polyrhythm.config.assemble import opened
from polyrhythm.config.image_size import with_image_size
from polyrhythm.config.recipe import configure


def photographs(place: Path, size: tuple[int, int], count: int = 20) -> Path:
    for number in range(count):
        path = place / "photographs" / ("left" if number % 2 else "right") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size if number else (900, 900), (8 * number, 0, 0)).save(path)
    return place / "photographs"


def size_of(data: object, **more: object) -> int | None:
    return with_image_size(configure({"data": data, "model": "mlp", **more})).image_size


@pytest.mark.parametrize(
    ("stored", "expected"),
    [((32, 32), 28), ((90, 64), 56), ((50, 48), 40), ((256, 300), 224), ((999, 800), 224)],
)
def test_the_shown_center_keeps_its_pixels(stored: tuple[int, int], expected: int, tmp_path: Path) -> None:
    assert size_of(str(photographs(tmp_path, stored))) == expected


def test_what_is_given_wins(tmp_path: Path) -> None:
    folder = str(photographs(tmp_path, (32, 32)))
    assert size_of(folder, image_size=100) == 100
    assert size_of(folder, image_size=None) is None  # a run of an earlier version, at 224
    assert size_of(folder, scale=64) is None
    assert size_of(f"image_folder(folder='{folder}', image_size=64)") is None
    assert size_of("digits") is None
    assert size_of(folder, weights="efficientnet_lite0") == 224


def test_a_network_that_needs_larger_images_gets_a_multiple(tmp_path: Path) -> None:
    folder = str(photographs(tmp_path, (32, 32)))
    assert size_of(folder, model="alexnet") == 84
    assert size_of(folder, model="vit_b_16") == 224
    own = nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 2))
    assert size_of(folder, model=own) == 224


def test_tables_and_shards_as_folders(tmp_path: Path) -> None:
    folder = photographs(tmp_path, (32, 32))
    files = sorted(folder.glob("*/*.png"))
    rows = [f"{path},{path.parent.name}" for path in files]
    (tmp_path / "table.csv").write_text("\n".join(["image,label", *rows]))
    assert size_of(str(tmp_path / "table.csv")) == 28
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for path in files:
            (path.parent / f"{path.stem}.cls").write_text(path.parent.name)
            archive.add(path, path.name)
            archive.add(path.parent / f"{path.stem}.cls", f"{path.stem}.cls")
    assert size_of(str(tmp_path / "all.tar")) == 28


def test_tables_of_encoded_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = photographs(tmp_path, (32, 32))
    table = datasets.load_dataset("imagefolder", data_dir=str(folder), cache_dir=str(tmp_path / "cache"))
    table["train"].to_parquet(str(tmp_path / "train.parquet"))
    assert size_of(str(tmp_path / "train.parquet")) == 28


def test_runs_record_the_size_and_keep_it(tmp_path: Path) -> None:
    folder = photographs(tmp_path, (32, 32))
    options = {"data": str(folder), "model": "mlp", "workers": 2, "epochs": 1, "batch_size": 4}
    for run in (
        polyrhythm.train(out=tmp_path / "run", start_method="fork", **options),
        polyrhythm.simulate(cluster="office", out=tmp_path / "simulated", **options),
    ):
        assert run is not None
        recorded = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert recorded["image_size"] == 28
    larger = photographs(tmp_path / "larger", (128, 128))
    folder.rename(tmp_path / "before")
    larger.rename(folder)
    assert opened(configure({"data": str(folder)})).image_shape == (3, 112, 112)
    assert polyrhythm.evaluate(tmp_path / "run")["images"] == 4
    assert size_of(str(folder), weights=str(tmp_path / "run")) == 28
    run = polyrhythm.train(resume=tmp_path / "run", start_method="fork", epochs=2)
    assert run is not None
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["image_size"] == 28


@pytest.mark.parametrize(
    "options",
    [{}, {"pixels": "centered"}, {"image_size": 20}, {"image_size": 20, "scale": 32, "pixels": "centered"}],
)
def test_a_file_of_weights_is_tested_as_its_run(options: dict[str, Any], tmp_path: Path) -> None:
    folder = str(photographs(tmp_path, (32, 32)))
    common = {"model": "cifar_resnet", "workers": 1, "epochs": 1, "batch_size": 4}
    run = polyrhythm.train(out=tmp_path / "run", start_method="fork", data=folder, **common, **options)
    assert run is not None
    file = run.folder / "model.safetensors"
    figures = [polyrhythm.evaluate(weights)["test_loss"] for weights in (run.folder, file)]
    assert figures[0] == figures[1] == run.figures["test_loss"]
    config = with_image_size(configure({"data": folder, "weights": str(file)}))
    assert (config.image_size, config.pixels) == (
        options.get("image_size", 28),
        options.get("pixels", "imagenet"),
    )
