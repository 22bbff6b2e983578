"""Data sets of the library `datasets`: saved folders, Parquet and Arrow files, and a hub that is played."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError

datasets = pytest.importorskip("datasets")
CLASSES = ("zebra", "ant")  # not in the order of the alphabet: the data set's own order counts
COLOURS = {"zebra": (240, 240, 240), "ant": (20, 30, 40)}


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def picture(name: str, number: int) -> bytes:
    pixels = np.full((20, 30, 3), COLOURS[name], dtype=np.uint8)
    pixels[0, 0] = number
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def table(count: int, *, named: bool = True, column: str = "image", label: str = "label", first: int = 0):
    names = [CLASSES[number % 2] for number in range(count)]
    cells = [{"bytes": picture(name, first + n), "path": None} for n, name in enumerate(names)]
    kind = datasets.ClassLabel(names=list(CLASSES)) if named else datasets.Value("string")
    features = datasets.Features({column: datasets.Image(), label: kind, "source": datasets.Value("string")})
    return datasets.Dataset.from_dict(
        {column: cells, label: names, "source": ["web"] * count}, features=features
    )


def test_a_saved_folder_keeps_its_classes_order_and_splits(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(6), "validation": table(4, first=6)}).save_to_disk(
        tmp_path / "saved"
    )
    data = open_data(str(tmp_path / "saved"), image_size=8)
    assert data.classes == CLASSES
    assert (len(data.train), len(data.test)) == (6, 4)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.image_shape == (3, 8, 8)
    light, dark = data.train.images(torch.tensor([0, 1]))
    white = torch.tensor(data.white)[:, None, None]
    black = torch.tensor(data.black)[:, None, None]
    for seen, color in ((light, COLOURS["zebra"]), (dark, COLOURS["ant"])):
        share = torch.tensor(color)[:, None, None] / 255
        torch.testing.assert_close(seen, (black + (white - black) * share).expand(3, 8, 8))
    assert [tuple(each.shape) for each in data.train.whole(torch.tensor([3]), 10)] == [(3, 10, 15)]


def test_parquet_and_arrow_files_are_split_by_their_names_or_else_held_out(tmp_path: Path) -> None:
    table(6).to_parquet(tmp_path / "train-00000-of-00001.parquet")
    table(4).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    data = open_data(str(tmp_path / "*.parquet"), image_size=4)
    assert (len(data.train), len(data.test)) == (6, 4)
    alone = open_data(str(tmp_path / "train-00000-of-00001.parquet"), image_size=4)
    assert len(alone.train) + len(alone.test) == 6
    assert sorted(alone.test.labels.tolist()) == [0, 1]  # of every class
    table(10, named=False, column="photo", label="kind").save_to_disk(tmp_path / "arrow")
    (file,) = (tmp_path / "arrow").glob("*.arrow")
    with pytest.raises(
        RequestError, match=r"no one column that is the label: name one of photo \(Image\), kind"
    ):
        open_data(str(file), image_size=4)
    named = open_data(f"hugging_face(path='{file}', label=kind)", image_size=4)
    assert named.classes == ("ant", "zebra")  # texts have no order of their own


def test_the_hub_is_asked_for_the_name_and_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None):
        asked.append((name, subset))
        return datasets.DatasetDict({"train": table(4), "test": table(2)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(open_data("hf://somebody/insects", image_size=4).test) == 2
    open_data("hugging_face(path='hf://somebody/insects', subset=large)", image_size=4)
    assert asked == [("somebody/insects", None), ("somebody/insects", "large")]
    with pytest.raises(RequestError, match="has the splits train, test: name the one to learn from"):
        open_data("hugging_face(path='hf://somebody/insects', train=all)", image_size=4)
    with pytest.raises(RequestError, match="has no split holdout: it has train, test"):
        open_data("hugging_face(path='hf://somebody/insects', test=holdout)", image_size=4)

    def no_network(name: str, subset: str | None):
        raise ConnectionError("Couldn't reach 'somebody/insects' on the Hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(
        RequestError, match=r"hf://somebody/insects cannot be opened \(Couldn't reach [^\n]*\)$"
    ):
        open_data("hf://somebody/insects")


def test_broken_pictures_and_missing_labels_are_named(tmp_path: Path) -> None:
    broken = table(6).to_dict()
    broken["image"] = [{"bytes": picture("ant", 0), "path": None} for _ in range(6)]
    broken["image"][4] = {"bytes": b"no picture", "path": None}
    made = datasets.Dataset.from_dict(broken, features=table(2).features)
    datasets.DatasetDict({"train": made, "test": table(2)}).save_to_disk(tmp_path / "broken")
    with pytest.raises(RequestError, match=r"image 4 of .* cannot be read .*--skip-unreadable"):
        open_data(str(tmp_path / "broken"), image_size=4)
    left = open_data(str(tmp_path / "broken"), image_size=4, skip_unreadable=True)
    assert len(left.train) == 5
    assert len(left.skipped) == 1
    blind = table(4).to_dict() | {"label": [-1] * 4}
    hidden = datasets.Dataset.from_dict(
        {**blind, "image": [{"bytes": picture("ant", 0), "path": None}] * 4}, features=table(2).features
    )
    datasets.DatasetDict({"train": table(4), "test": hidden}).save_to_disk(tmp_path / "hidden")
    with pytest.raises(RequestError, match="lacks labels of some images: name another split"):
        open_data(str(tmp_path / "hidden"), image_size=4)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        RequestError, match=r"takes the package datasets: pip install 'polyrhythm\[datasets\]'"
    ):
        open_data("hf://somebody/insects")
