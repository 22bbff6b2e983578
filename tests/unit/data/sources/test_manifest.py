"""Tables of weakly labeled images: what is read of them, and what is refused."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from polyrhythm.data.dataset import Dataset
from polyrhythm.data.open import open_data
from polyrhythm.data.sources.manifest import Manifest, best_label, duplicates, read_manifest
from polyrhythm.errors import RequestError

HEAD = "image,labels,confidence,subset,split\n"


def _picture(path: Path, tone: int) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((20, 20, 3), tone, np.uint8)).save(path)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Eight pictures: cats are dark, dogs are light; two subsets; one picture with two labels."""
    lines = []
    for number in range(8):
        _picture(tmp_path / "pictures" / f"{number}.png", 10 + 30 * number)
        label = "cat" if number < 4 else "dog"
        labels, confidence = ("dog|cat", "0.3|0.6") if number == 1 else (label, "0.9")
        subset = "tag_pool|tag_restricted" if number % 2 else "tag_restricted"
        split = "test" if number in (3, 7) else "train"
        lines.append(f"pictures/{number}.png,{labels},{confidence},{subset},{split}\n")
    path = tmp_path / "table.csv"
    path.write_text(HEAD + "".join(lines))
    return path


def _tones(dataset: Dataset, part: str = "train") -> list[int]:
    split = getattr(dataset, part)
    images = split.images(torch.arange(len(split)))
    return sorted(round(float(each[0, 0, 0]) * 0.229 * 255 + 0.485 * 255) for each in images)


def test_an_image_learns_its_most_confident_label(table: Path) -> None:
    dataset = open_data(str(table), image_size=16)
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.test.labels.tolist() == [0, 1]
    assert dataset.image_shape == (3, 16, 16)
    assert _tones(dataset) == [10, 40, 70, 130, 160, 190]


def test_or_every_one_of_its_labels(table: Path) -> None:
    dataset = Manifest(file=str(table), labels="every").load()
    assert dataset.train.labels.tolist() == [0, 1, 0, 0, 1, 1, 1]


def test_labels_below_a_confidence_are_left_out(table: Path) -> None:
    dataset = Manifest(file=str(table), min_confidence=0.7).load()
    assert _tones(dataset) == [10, 70, 130, 160, 190]
    with pytest.raises(RequestError, match=r"no label of confidence 0\.95"):
        Manifest(file=str(table), min_confidence=0.95).load()


def test_one_subset_is_trained_on_and_another_reported(table: Path) -> None:
    pool = open_data(f"manifest(file='{table}', subset=tag_pool)")
    assert _tones(pool) == [40, 160]
    assert _tones(pool, "test") == [100, 220]
    whole = open_data(f"manifest(file='{table}', subset=tag_restricted)")
    assert whole.classes == pool.classes
    assert len(whole.train) == 6
    with pytest.raises(RequestError, match=r"unknown subset 'pool': did you mean tag_pool\?"):
        Manifest(file=str(table), subset="pool").load()


def test_without_splits_a_fifth_is_held_out(tmp_path: Path) -> None:
    lines = []
    for number in range(10):
        _picture(tmp_path / f"{number}.png", 20 * number)
        lines.append(f"{number}.png\t{'a' if number < 5 else 'b'}\n")
    path = tmp_path / "table.tsv"
    path.write_text("image\tlabel\n" + "".join(lines))
    dataset = open_data(str(path))
    assert sorted(dataset.test.labels.tolist()) == [0, 1]
    assert len(dataset.train) == 8


def test_missing_and_broken_files_are_named_and_left_out_only_if_asked(table: Path) -> None:
    missing, broken = table.parent / "pictures" / "0.png", table.parent / "pictures" / "4.png"
    missing.unlink()
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(RequestError, match=r"0\.png cannot be read \(No such file.*and 1 more cannot"):
        open_data(str(table))
    dataset = open_data(str(table), skip_unreadable=True)
    assert dataset.skipped == (str(missing), str(broken))
    assert _tones(dataset) == [40, 70, 160, 190]


def test_labels_that_only_test_images_have_are_refused(table: Path) -> None:
    _picture(table.parent / "x.png", 1)
    table.write_text(table.read_text() + "x.png,zebra,1,,test\n")
    with pytest.raises(RequestError, match=r"test labels that no training image has \(zebra\)"):
        open_data(str(table))
    assert len(open_data(str(table), skip_unreadable=True).test) == 2


def test_training_copies_of_test_images_are_found_by_their_bytes(
    table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = table.parent / "elsewhere.png"
    copy.write_bytes((table.parent / "pictures" / "3.png").read_bytes())
    table.write_text(table.read_text() + "elsewhere.png,cat,1,,train\n")
    with caplog.at_level(logging.WARNING):
        dataset = open_data(str(table))
    assert _tones(dataset) == [10, 40, 70, 130, 160, 190]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"1 training images are test images too, such as {copy} ({table.parent}/pictures/3.png): left out of training"
    )
    with caplog.at_level(logging.WARNING):
        assert len(Manifest(file=str(table), duplicates="keep").load().train) == 7
    assert caplog.records[-1].getMessage().endswith(": kept")
    with pytest.raises(
        RequestError, match=r"1 training images are test images too, such as .*elsewhere\.png"
    ):
        Manifest(file=str(table), duplicates="refuse").load()


def test_files_of_one_size_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    for name, content in {"a": b"12", "b": b"12", "c": b"13", "d": b"123"}.items():
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in "abcd"]
    assert duplicates(files[1:], files[:1]) == {files[1]: files[0]}
    assert duplicates([str(tmp_path / "gone")], files) == {}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (",cat,,,\n", "image 1: it needs an image and at least one label"),
        ("a.png,,,,\n", "image 1: it needs an image and at least one label"),
        ("a.png,cat,sure,,\n", "confidence 'sure' is not a number"),
        ("a.png,cat|dog,0.1|0.2|0.3,,\n", "2 labels need as many confidences"),
        ("a.png,cat,1.5,,\n", "1 labels need as many confidences, from 0 to 1"),
        ("a.png,cat,,,exam\n", "split 'exam' is unknown"),
        ("", "lists no images"),
        ("a.png,cat,,,train\nb.png,cat,,,\n", "a split for some images, and none for others"),
    ],
)
def test_lines_that_make_no_sense_are_refused(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEAD + line)
    with pytest.raises(RequestError, match=complaint):
        read_manifest(path)


def test_one_confidence_is_that_of_all_labels(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEAD + "a.png,cat | dog,0.5,x|y,val\n")
    (row,) = read_manifest(path)
    assert row.labels == (("cat", 0.5), ("dog", 0.5))
    assert (best_label(row), row.split, row.subsets) == ("cat", "test", {"x", "y"})


def test_tables_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="No such file"):
        open_data(str(tmp_path / "table.csv"))
    (tmp_path / "table.csv").write_bytes(b"image,labels\n\xff\xfe,b\n")
    with pytest.raises(RequestError, match="not a table of text in UTF-8"):
        open_data(str(tmp_path / "table.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        RequestError, match=r"takes the package pyarrow: pip install 'polyrhythm\[parquet\]', or give a CSV"
    ):
        open_data(str(tmp_path / "table.parquet"))


def test_a_parquet_table_says_what_a_text_says(tmp_path: Path) -> None:
    """Once with `|` in texts, once with real lists, as Parquet has them."""
    (tmp_path / "table.csv").write_text(
        HEAD + "a.png,cat|dog,0.9|0.4,x|y,train\nb.png,dog,,x,test\n", encoding="utf-8"
    )
    expected = read_manifest(tmp_path / "table.csv")
    texts = {
        "image": ["a.png", "b.png"],
        "labels": ["cat|dog", "dog"],
        "confidence": ["0.9|0.4", None],
        "subset": ["x|y", "x"],
        "split": ["train", "test"],
    }
    lists = texts | {"labels": [["cat", "dog"], ["dog"]], "confidence": [[0.9, 0.4], None]}
    lists |= {"subset": [["x", "y"], ["x"]]}
    for columns in (texts, lists):
        parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet")
        assert read_manifest(tmp_path / "table.parquet") == expected
    for name, picture in (("a.png", 1), ("b.png", 2), ("c.png", 3)):
        _picture(tmp_path / name, picture)
    parquet.write_table(
        pyarrow.table(
            {"image": ["a.png", "b.png", "c.png"], "label": ["cat", "dog", "cat"]}
            | {"split": ["train", "train", "test"]}
        ),
        tmp_path / "table.parquet",
    )
    dataset = open_data(str(tmp_path / "table.parquet"), image_size=8)
    assert (dataset.classes, len(dataset.train), dataset.test.labels.tolist()) == (("cat", "dog"), 2, [0])


def test_a_damaged_parquet_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match=r"table\.parquet cannot be read"):
        read_manifest(tmp_path / "table.parquet")


def test_one_class_is_not_enough(tmp_path: Path) -> None:
    _picture(tmp_path / "a.png", 1)
    (tmp_path / "table.csv").write_text("image,label\na.png,cat\n")
    with pytest.raises(RequestError, match="has 1 class for training"):
        open_data(str(tmp_path / "table.csv"))


@pytest.mark.parametrize("heading", ["picture,labels", "image,class", "a.png,cat"])
def test_a_table_without_the_columns_says_which_it_has(tmp_path: Path, heading: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{heading}\na.png,cat\n")
    with pytest.raises(
        RequestError, match=f"has the columns {heading.replace(',', ', ')}: it needs image and labels"
    ):
        read_manifest(path)
