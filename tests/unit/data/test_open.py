from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.data.open import open_data
from polyrhythm.data.sources.digits import Digits
from polyrhythm.data.sources.fashion_mnist import FashionMNIST
from polyrhythm.errors import RequestError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("train/a", "train/b"):
        place = tmp_path / "pictures" / name
        place.mkdir(parents=True)
        for number in range(5):
            Image.fromarray(np.full((9, 9, 3), number, np.uint8)).save(place / f"{number}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize("source", ["digits", " digits ", "digits()", Digits()])
def test_a_name_a_spec_and_a_configuration_open_the_same(source):
    dataset = open_data(source)
    assert (dataset.name, len(dataset.train), len(dataset.test)) == ("digits", 1438, 359)


@pytest.mark.parametrize(
    "source",
    [
        "fashion-mnist=/no/such/folder",
        "fashion_mnist=/no/such/folder",
        "fashion-mnist(folder='/no/such/folder')",
        FashionMNIST(folder="/no/such/folder"),
    ],
)
def test_a_name_with_a_folder_looks_there(source):
    with pytest.raises(RequestError, match=r"/no/such/folder/train-images-idx3-ubyte\.gz cannot be read"):
        open_data(source)


def test_the_path_of_a_folder_opens_images(folder, monkeypatch):
    for source in (str(folder), folder, f"image-folder={folder}", f"image-folder(folder='{folder}')"):
        assert open_data(source, image_size=8).classes == ("a", "b")
    monkeypatch.chdir(folder.parent)
    assert open_data("pictures").image_shape == (3, 224, 224)
    assert open_data("./pictures").name == "./pictures"
    assert open_data(Path("pictures"), image_size=4).image_shape == (3, 4, 4)


def test_a_home_folder_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(open_data("~/pictures", image_size=8).test) == 2


def test_a_known_name_wins_over_a_folder_of_that_name(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    folder.rename("digits")
    assert open_data("digits").image_shape == (1, 8, 8)
    assert open_data("./digits").image_shape == (3, 224, 224)


def test_the_image_size_of_the_spec_stays_unless_another_is_asked_for(folder):
    source = f"image-folder(folder='{folder}', image_size=12)"
    assert open_data(source).image_shape == (3, 12, 12)
    assert open_data(source, image_size=6).image_shape == (3, 6, 6)


def test_other_data_are_scaled_to_the_image_size():
    dataset = open_data("digits", image_size=32)
    assert dataset.image_shape == (1, 32, 32)
    assert dataset.train.images(torch.tensor([3])).shape == (1, 1, 32, 32)


def test_unreadable_images_are_left_out_if_asked(folder):
    broken = folder / "train/b/0.png"
    broken.write_text("hello")
    with pytest.raises(RequestError, match="--skip-unreadable"):
        open_data(str(folder))
    assert open_data(str(folder), skip_unreadable=True).skipped == (str(broken),)
    assert open_data(f"image-folder(folder='{folder}', skip_unreadable=true)").skipped == (str(broken),)


def test_own_objects_are_opened():
    images, labels = torch.randn(4, 1, 5, 5), torch.tensor([0, 1, 0, 1])
    assert open_data(((images, labels), (images, labels))).classes == ("0", "1")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("fashin-mnist", "unknown data 'fashin-mnist': did you mean fashion-mnist?"),
        (
            "imagenet-22k",
            "unknown data 'imagenet-22k'.* \\(or a folder of images, a table.*; /.* has no folder of",
        ),
        ("photos.tar.gz", "unknown data 'photos.tar.gz'.* or tar files"),
        ("notmnist(", "unknown data 'notmnist\\('"),
        ("digits(size=3)", "data digits takes no keys"),
        ("digits=/somewhere", "data digits takes no keys"),
        ("digits(", "cannot read 'digits\\('"),
        ("fashion-mnist(path=3)", "unknown key of data fashion-mnist 'path'"),
        ("/no/such/folder", "there is no folder /no/such/folder: put images into"),
        ("./missing", "there is no folder missing"),
        ("", "unknown data ''"),
        (17, "data is a int"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_one_line(source, message):
    with pytest.raises(RequestError, match=message) as caught:
        open_data(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["digits", "./"])
@pytest.mark.parametrize("size", [0, -3])
def test_an_image_size_below_one_is_refused(source, size):
    with pytest.raises(RequestError, match=r"image.size"):
        open_data(source, image_size=size)
