import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.data.decoded_files import keep_decoded
from polyrhythm.data.image_files import ImageFileSplit, list_images
from polyrhythm.data.loader import Loader, Share
from polyrhythm.data.sources.image_folder import ImageFolder
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import evaluate, evaluate_part
from polyrhythm.evaluation.predictions import predictions_csv


def add(folder, name, count, value=100, suffix="png"):
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((20, 24, 3), value + number, np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02}.{suffix}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def animals(tmp_path):
    root = tmp_path / "animals"
    for part, counts in {"train": (10, 5), "test": (2, 3)}.items():
        add(root / part, "dog", counts[0], 10)
        add(root / part, "cat", counts[1], 200)
    return root


def load(folder, **keys):
    return ImageFolder(folder=str(folder), image_size=16, **keys).load()


def test_classes_are_sorted_and_images_normalized_as_imagenets(animals):
    dataset = load(animals)
    assert dataset.classes == ("cat", "dog")
    assert dataset.image_shape == (3, 16, 16)
    assert dataset.train.labels.tolist() == [0] * 5 + [1] * 10
    assert dataset.test.labels.tolist() == [0] * 3 + [1] * 2
    assert dataset.skipped == ()
    images = dataset.train.images(torch.tensor([2, 5]))
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for image, value in zip(images, (202, 10), strict=True):
        wanted = ((value / 255 - mean) / std)[:, None, None].expand(3, 16, 16)
        torch.testing.assert_close(image, wanted)


def test_channels_are_red_green_blue(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (20, 20), (255, 0, 0)).save(path)
    image = ImageFileSplit([str(path)], torch.tensor([0]), 8).images(torch.tensor([0]))[0]
    assert image.mean((1, 2)).tolist() == pytest.approx([2.2489, -2.0357, -1.8044], abs=1e-4)


def test_an_empty_batch_has_the_shape_of_images(animals):
    assert load(animals).train.images(torch.tensor([], dtype=torch.int64)).shape == (0, 3, 16, 16)


def test_val_stands_for_test_where_there_is_none(animals):
    (animals / "test").rename(animals / "val")
    assert len(load(animals).test) == 5
    add(animals / "test", "cat", 1)
    assert len(load(animals).test) == 1


def test_without_test_images_a_fixed_fifth_of_every_class_is_held_out(tmp_path):
    add(tmp_path / "train", "a", 20, 0)
    add(tmp_path / "train", "b", 10, 100)
    dataset, again = load(tmp_path), load(tmp_path)
    assert dataset.train.labels.bincount().tolist() == [16, 8]
    assert dataset.test.labels.bincount().tolist() == [4, 2]
    parts = [split.images(torch.arange(len(split)))[:, 0, 0, 0] for split in (dataset.train, dataset.test)]
    assert torch.cat(parts).unique().numel() == 30
    assert torch.equal(parts[1], again.test.images(torch.arange(6))[:, 0, 0, 0])


def test_classes_alone_are_a_folder_to_train_from(tmp_path):
    for name, value in (("b", 0), ("a", 100)):
        add(tmp_path / name, ".", 10, value)
    dataset = load(tmp_path)
    assert dataset.classes == ("a", "b")
    assert dataset.train.labels.bincount().tolist() == [8, 8]


def test_a_folder_of_one_class_is_named(tmp_path):
    add(tmp_path, "cat", 3)
    with pytest.raises(RequestError, match=rf"{tmp_path} holds one class only \(cat\)"):
        load(tmp_path)


def test_parts_by_other_names_are_not_taken_for_classes(tmp_path):
    for part in ("training", "validation"):
        for name in ("a", "b"):
            add(tmp_path / part, name, 10)
    with pytest.raises(RequestError, match=f"there is no folder {tmp_path}/train: put images into"):
        load(tmp_path)


def test_a_picture_is_no_folder(tmp_path):
    add(tmp_path, "a", 1)
    with pytest.raises(
        RequestError, match=r"00\.png is a file: name a folder with images in train/<class>/ or <class>/"
    ):
        load(tmp_path / "a" / "00.png")


def test_lists_deeper_folders_and_any_case_but_nothing_hidden_or_strange(tmp_path):
    add(tmp_path, "cat", 1)
    add(tmp_path / "cat", "tabby", 1, suffix="JPG")
    add(tmp_path / "cat", ".thumbnails", 1)
    add(tmp_path, ".git", 1)
    (tmp_path / "cat/._00.png").write_bytes(b"")
    (tmp_path / "cat/notes.txt").write_text("")
    (tmp_path / "README.md").write_text("")
    assert list_images(tmp_path) == {"cat": [f"{tmp_path}/cat/00.png", f"{tmp_path}/cat/tabby/00.JPG"]}


def test_classes_may_be_links(tmp_path, animals):
    linked = tmp_path / "linked" / "train"
    linked.mkdir(parents=True)
    for name in ("cat", "dog"):
        (linked / name).symlink_to(animals / "train" / name)
    assert len(load(linked.parent).train) == 12


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_unreadable_images_are_named_and_left_out_only_if_asked(animals):
    cut(animals / "train/dog/03.png")
    (animals / "test/cat/00.png").write_text("hello")
    with pytest.raises(
        RequestError, match=r"train/dog/03\.png cannot be read \(.*and 1 more.*--skip-unreadable"
    ):
        load(animals)
    dataset = load(animals, skip_unreadable=True)
    assert dataset.skipped == (f"{animals}/train/dog/03.png", f"{animals}/test/cat/00.png")
    assert (len(dataset.train), len(dataset.test)) == (14, 4)
    assert dataset.train.images(torch.arange(14)).shape == (14, 3, 16, 16)


def test_what_was_left_out_is_said(animals):
    assert load(animals).remark == ""
    broken = [animals / "train" / "cat" / f"{number:02}.png" for number in range(4)]
    cut(broken[0])
    assert load(animals, skip_unreadable=True).remark == f"1 file is left out: {broken[0]}"
    for path in broken[1:]:
        cut(path)
    named = ", ".join(map(str, broken[:3]))
    assert load(animals, skip_unreadable=True).remark == f"4 files are left out: {named} and 1 more"


def test_an_image_that_breaks_later_is_named_when_its_batch_is_made(animals):
    dataset = load(animals)
    cut(animals / "train/cat/01.png")
    with pytest.raises(RequestError, match=r"cat/01\.png cannot be read"):
        dataset.train.images(torch.arange(5))


def spoil_missing_train(root):
    (root / "train").rename(root / "pictures")


def spoil_no_images(root):
    for path in (root / "train").rglob("*.png"):
        path.rename(path.with_suffix(".txt"))


def spoil_flat(root):
    for number, path in enumerate(sorted((root / "train").rglob("*.png"))):
        path.rename(root / "train" / f"{number}.png")
    for name in ("cat", "dog"):
        (root / "train" / name).rmdir()


def spoil_one_class(root):
    (root / "train/dog").rename(root / "dog")


def spoil_empty_class(root):
    (root / "train/bird").mkdir()


def spoil_strange_class(root):
    add(root / "test", "bird", 1)


def spoil_empty_test(root):
    (root / "test/dog").rename(root / "dog")
    (root / "test/cat").rename(root / "cat")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_missing_train, r"no folder .*animals/train: put images into .*train/<class>/"),
        (spoil_no_images, r"no images in .*train/<class>/: put some there"),
        (spoil_flat, r"no images in .*train/<class>/"),
        (spoil_one_class, r"animals/train holds one class only \(cat\)"),
        (spoil_empty_class, r"no images in .*train/bird"),
        (spoil_strange_class, r"animals/test has classes that .*train lacks \(bird\)"),
        (spoil_empty_test, r"no images in .*animals/test/<class>/"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_in_one_line(animals, spoil, message):
    spoil(animals)
    with pytest.raises(RequestError, match=message) as caught:
        load(animals)
    assert "\n" not in str(caught.value)


def test_too_few_images_to_hold_some_out_are_refused(tmp_path):
    add(tmp_path / "train", "a", 1)
    add(tmp_path / "train", "b", 1)
    with pytest.raises(RequestError, match="too few images to hold some out: add a test folder"):
        load(tmp_path)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file cannot be listed"):
        list_images(tmp_path / "file")


@pytest.mark.parametrize("name", ["validation", "valid"])
def test_other_names_of_the_test_part_are_read(animals, name):
    (animals / "test").rename(animals / name)
    assert len(load(animals).test) == 5
    assert load(animals).remark == ""


def test_everything_that_is_not_read_is_counted_and_named(animals):
    add(animals / "val", "cat", 1)
    add(animals / "extra", "cat", 1)
    (animals / "train/cat/01.heic").write_bytes(b"")
    (animals / "test/dog/notes.txt").write_text("")
    (animals / "train/readme.md").write_text("")
    (animals / "train/cat/.DS_Store").write_bytes(b"")
    (animals / "train/cat/more").symlink_to(animals / "train/dog")
    assert load(animals).remark == (
        f"2 entries are not read, next to train: {animals}/extra, {animals}/val; "
        "2 files are not read, for an ending that no image has: "
        f"{animals}/train/cat/01.heic, {animals}/test/dog/notes.txt; "
        f"1 file is not read, next to the classes' folders: {animals}/train/readme.md; "
        f"1 link is not followed, inside a class: {animals}/train/cat/more; "
        f"1 hidden file is not read: {animals}/train/cat/.DS_Store"
    )
    assert len(load(animals).train) == 15


class Light(torch.nn.Module):
    """Takes light pictures for the first class."""

    def forward(self, images):
        light = images.mean((1, 2, 3))
        return torch.stack([light, -light], 1)


def test_images_that_break_later_are_left_out_of_their_batches_if_asked(animals):
    dataset = load(animals, skip_unreadable=True)
    cut(animals / "train/cat/01.png")
    (animals / "train/dog/03.png").unlink()
    cut(animals / "test/dog/00.png")
    loader = Loader(dataset.train, Share(0, 1, 5, seed=0))
    batches = list(loader.epoch(0))
    assert sum(batch.size for batch in batches) == 13
    assert all(len(batch.images) == len(batch.labels) for batch in batches)
    assert torch.cat([batch.labels for batch in batches]).bincount().tolist() == [4, 9]

    found = evaluate(Light(), dataset.test, classes=dataset.classes)
    assert (found.images, found.top1) == (4, 1.0)
    assert [entry.images for entry in found.per_class] == [3, 1]
    assert predictions_csv(found, dataset.test.labels, dataset.classes).count("\n") == 1 + 4
    whole = evaluate_part(Light(), dataset.test, range(1), classes=dataset.classes)
    assert evaluate(Light(), dataset.test, classes=dataset.classes, tested=[whole]) == found
    kept = keep_decoded(load(animals, skip_unreadable=True).train, animals / "decoded")
    assert sum(batch.size for batch in Loader(kept, Share(0, 1, 5, seed=0)).epoch(0)) == 13


def test_test_images_none_of_which_can_be_read_are_refused(animals):
    dataset = load(animals, skip_unreadable=True)
    for path in (animals / "test").rglob("*.png"):
        path.unlink()
    with pytest.raises(RequestError, match="none of the test images can be read"):
        evaluate(Light(), dataset.test, classes=dataset.classes)
