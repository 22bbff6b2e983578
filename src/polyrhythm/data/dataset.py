"""Data sets: two splits of labeled images, and what a model must know about them."""

from __future__ import annotations

import json
import operator
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polyrhythm.data.images import CENTRAL_SHARE
from polyrhythm.errors import RequestError, printable

OWN_EPOCHS = 10
_LOOKED_AT = 256
"""Number of images of a user's own data with a minimum and maximum that are taken as black and white."""

_WANTED = (
    "give a (train, test) pair, each a map-style torch Dataset of (image tensor, label) "
    "or an (images, labels) pair of tensors"
)


@runtime_checkable
class Split(Protocol):
    """One part of a data set; its images are numbered from 0."""

    def __len__(self) -> int:
        """Return the number of images."""

    @property
    def labels(self) -> Tensor:
        """The classes of all images, (n,) int64."""

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, H, W) float32, normalized; B may be 0."""


class UnreadableFiles(RequestError):
    """Images cannot be read any more, and may be left out.

    Attributes:
        numbers: numbers of these images in the split that was asked for them.
    """

    def __init__(self, text: str, numbers: Iterable[int]) -> None:
        super().__init__(text)
        self.numbers = frozenset(numbers)


def read_readable(read: Callable[[Tensor], Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the readable ones of `indices`, (B,) int64, and the result of `read` for them.

    Raises:
        RequestError: an image cannot be read, and may not be left out.
    """
    while True:
        try:
            return indices, read(indices)
        except UnreadableFiles as error:
            left = indices[[number not in error.numbers for number in indices.tolist()]]
            if len(left) == len(indices):
                raise
            indices = left


_NAMED = 3
"""Skipped files that a remark names."""


@dataclass(frozen=True)
class ExcludedFiles:
    """Files or folders that are no part of the data.

    Attributes:
        what: noun for one of them.
        why: rest of the sentence, after the verb.
        names: names of all of them.
    """

    what: str
    why: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return a sentence with their number and the first names."""
        named, more = ", ".join(map(printable, self.names[:_NAMED])), len(self.names) - _NAMED
        plural = f"{self.what[:-1]}ies" if self.what.endswith("y") else f"{self.what}s"
        count = f"1 {self.what} is" if len(self.names) == 1 else f"{len(self.names):,} {plural} are"
        return f"{count} {self.why}: {named}" + (f" and {more:,} more" if more > 0 else "")


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Attributes:
        name: name given by the user.
        train: the training images.
        test: the test images.
        classes: the name of every class, in the order of the labels.
        image_shape: C, H, W of every image.
        default_epochs: passes over `train` after which a small model has learned most of it.
        skipped: files that were left out because they could not be read.
        black: value of a black pixel, one for all channels or one per channel.
        white: value of a white pixel, one for all channels or one per channel.
        shown: side of the center square that images are made of, as a share of an image's shorter side.
        names: names of all training images and of all test images, in their order; None: images have no names.
        held_out: whether the test images were held out of the training images.
        left_out: number of skipped files and folders.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    default_epochs: int
    skipped: tuple[str, ...] = ()
    black: tuple[float, ...] = (0.0,)
    white: tuple[float, ...] = (1.0,)
    shown: float = CENTRAL_SHARE
    names: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    held_out: bool = False
    left_out: tuple[ExcludedFiles, ...] = ()

    def __post_init__(self) -> None:
        # Names go to terminals, tables and lists of lines: a folder's may hold escape sequences or line ends.
        object.__setattr__(self, "classes", tuple(printable(normal(name)) for name in self.classes))

    def __getstate__(self) -> dict[str, Any]:
        # Workers need no names, and there may be millions; the recorded hash of them is computed before.
        return {**self.__dict__, "listing_sha256": self.listing_sha256, "names": None}

    @cached_property
    def listing_sha256(self) -> str:
        """SHA-256, in hexadecimal digits, of the class of every image, and of its name where images have names."""
        digest = sha256(json.dumps(self.classes).encode())
        for part, split in enumerate((self.train, self.test)):
            labels = split.labels
            digest.update(f"\n{part} {len(labels)}\n".encode())
            if self.names is None:
                digest.update(labels.numpy().tobytes())
                continue
            named = zip(self.names[part], labels.tolist(), strict=True)
            entries = sorted(f"{name}\0{label}\n" for name, label in named)
            digest.update("".join(entries).encode(errors="backslashreplace"))
        return digest.hexdigest()

    @property
    def remark(self) -> str:
        """A line about everything that was left out; empty if there is nothing."""
        unreadable = [ExcludedFiles("file", "left out", self.skipped)] if self.skipped else []
        return "; ".join(map(str, [*unreadable, *self.left_out]))


def normal(name: str) -> str:
    """Return a name in Unicode's form NFC: file systems write the same letters in different ways."""
    return unicodedata.normalize("NFC", name)


class TensorSplit:
    """Images and labels in memory.

    Bytes stay bytes and are normalized a batch at a time, which takes a quarter of the memory and no more time.

    Args:
        images: (n, C, H, W), float32 or uint8.
        labels: (n,) integers.
        mean: subtracted from every pixel, in the unit of `images`; the difference is divided by `std`.
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: float = 0.0, std: float = 1.0) -> None:
        assert len(images) == len(labels)
        self._images = images
        self.labels = labels.to(torch.int64)
        self._shift, self._scale = torch.tensor(-mean / std), 1 / std
        self.is_finished = images.dtype == torch.float32 and (mean, std) == (0.0, 1.0)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def kept_bytes(self) -> int:
        """Memory of one stored image, in bytes."""
        return self._images[0].nbytes if len(self) else 0

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, H, W) float32 in new memory."""
        chosen = self._images.index_select(0, indices)
        return chosen if self.is_finished else self.normalized(chosen)

    def decoded(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as they are stored: (B, C, H, W)."""
        return self._images.index_select(0, indices)

    def normalized(self, decoded: Tensor) -> Tensor:
        """Return (B, C, H, W) float32 in new memory, on the device of `decoded`."""
        return torch.add(self._shift, decoded, alpha=self._scale)  # one pass instead of three


class Part:
    """Some of another split's images, in a given order: those of `indices`, (n,) int64."""

    def __init__(self, split: Split, indices: Tensor) -> None:
        self.whole_split = split
        self.indices = indices
        self.labels = split.labels.index_select(0, indices)

    def __len__(self) -> int:
        return len(self.indices)

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of `indices`, (B,) int64, as (B, C, H, W) float32, normalized."""
        return self.of_whole(self.whole_split.images, indices)

    def of_whole(self, read: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
        """Return the result of a method of the other split for these images."""
        try:
            return read(self.indices[indices])
        except UnreadableFiles as error:
            own = [number for number in indices.tolist() if int(self.indices[number]) in error.numbers]
            raise UnreadableFiles(str(error), own) from None


class TorchSplit:
    """A map-style `torch.utils.data.Dataset` with items (image tensor, label).

    Labels are read from its attribute `targets` if it has one; otherwise every item is read once.

    Raises:
        RequestError: raised at construction: no items, or items that are not an image tensor (C, H, W) and a label.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        self.image_shape = _shape_of_first(items)
        self.labels = _integers(_targets(items))

    def __len__(self) -> int:
        return len(self._items)

    def images(self, indices: Tensor) -> Tensor:
        """Return images as (B, C, H, W) float32; raise `RequestError` if they differ in shape."""
        if len(indices) == 0:
            return torch.empty(0, *self.image_shape)
        images = [self._items[index][0] for index in indices.tolist()]
        for index, image in zip(indices.tolist(), images, strict=True):
            _check_floats(image, index)
            if image.shape != self.image_shape:
                raise RequestError(
                    f"image {index} of the data is {tuple(image.shape)} and the first {self.image_shape}: "
                    "resize all to one shape"
                )
        return torch.stack(images).to(torch.float32)


def from_objects(data: Any) -> Dataset:
    """Return a data set made of a user's own objects.

    Args:
        data: a `Dataset`, which is returned unchanged, or a pair (train, test). Each is a map-style torch `Dataset` of
            (image tensor, label), a pair (images (n, C, H, W) float, labels (n,) integers), or a `Split`. Classes
            are named by the attribute `classes` of train if it has one, otherwise by their numbers.

    Raises:
        RequestError: it is none of these, or train and test do not fit each other.
    """
    if isinstance(data, Dataset):
        return data
    if not _is_pair(data):
        raise RequestError(f"data is a {type(data).__name__}: {_WANTED}")
    train, test = (_split(part) for part in data)
    shape, test_shape = (_image_shape(split) for split in (train, test))
    if shape != test_shape:
        raise RequestError(f"train images are {shape} and test images {test_shape}: give both one shape")
    classes = _classes(data[0], train, test)
    seen = train.images(torch.arange(min(len(train), _LOOKED_AT)))
    black, white = float(seen.min()), float(seen.max())
    return Dataset("own data", train, test, classes, shape, OWN_EPOCHS, black=(black,), white=(white,))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _split(part: Any) -> Split:
    # Many a torch Dataset has attributes of these names; only a Split's `images` is a method.
    if isinstance(part, Split) and callable(part.images):
        return part
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if _is_pair(part):
        return _tensor_split(*part)
    if hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        return TorchSplit(part)
    raise RequestError(f"a part of data is a {type(part).__name__}: {_WANTED}")


def _tensor_split(images: Any, labels: Any) -> TensorSplit:
    try:
        images, labels = torch.as_tensor(images), torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise RequestError(f"images and labels must be tensors or arrays: {_WANTED}") from None
    if images.ndim != 4 or not images.is_floating_point():
        raise RequestError(
            f"images are {tuple(images.shape)} {images.dtype}: give (n, C, H, W) floats, normalized"
        )
    if labels.shape != images.shape[:1]:
        raise RequestError(f"{len(images)} images have labels {tuple(labels.shape)}: give one label an image")
    return TensorSplit(images.to(torch.float32), _integers(labels))


def _integers(labels: Tensor) -> Tensor:
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise RequestError(f"labels are {tuple(labels.shape)} {labels.dtype}: give one integer an image")
    if len(labels) and int(labels.min()) < 0:
        raise RequestError(f"label {int(labels.min())} is negative: number the classes from 0")
    return labels.to(torch.int64)


def _shape_of_first(items: Any) -> tuple[int, int, int]:
    if len(items) == 0:
        raise RequestError(f"a part of data is empty: {_WANTED}")
    first = items[0]
    if not _is_pair(first) or not isinstance(first[0], Tensor) or first[0].ndim != 3:
        what = type(first[0]).__name__ if _is_pair(first) else type(first).__name__
        raise RequestError(f"an item of data gives a {what}: give (image tensor (C, H, W), label)")
    _check_floats(first[0], 0)
    channels, height, width = first[0].shape
    return channels, height, width


def _check_floats(image: Any, index: int) -> None:
    if not isinstance(image, Tensor) or not image.is_floating_point():
        kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
        raise RequestError(
            f"image {index} of the data is {kind}: give float tensors, normalized, such as image.float() / 255"
        )


def _targets(items: Any) -> Tensor:
    # A target transform may turn `targets` into other labels than the items show, so those are read.
    targets = getattr(items, "targets", None)
    if targets is None or getattr(items, "target_transform", None) is not None:
        return torch.tensor([_label(items[index][1], index) for index in range(len(items))])
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        return targets
    return torch.tensor([_label(target, index) for index, target in enumerate(targets)])


def _label(given: Any, index: int) -> int:
    """Return the label of an item.

    Raises:
        RequestError: it is not one whole number.
    """
    numbers = getattr(given, "shape", ())
    if len(numbers) > 0 and tuple(numbers) != (1,):
        raise RequestError(
            f"item {index} of the data has a label of shape {tuple(numbers)}, such as one-hot or multi-hot ones: give "
            "the number of its one class, such as label.argmax()"
        )
    try:
        return operator.index(given)
    except TypeError:
        pass
    try:
        if not isinstance(given, str | bytes) and float(given) == int(given):  # 3.0, as tables have it
            return int(given)
    except (TypeError, ValueError, OverflowError):
        pass
    raise RequestError(
        f"item {index} of the data has the label {given!r:.50} ({type(given).__name__}): give the number of its class, "
        "from 0"
    )


def _image_shape(split: Split) -> tuple[int, int, int]:
    if len(split) == 0:
        raise RequestError(f"a part of data is empty: {_WANTED}")
    channels, height, width = split.images(torch.zeros(1, dtype=torch.int64)).shape[1:]
    return channels, height, width


def _classes(given: Any, train: Split, test: Split) -> tuple[str, ...]:
    count = int(train.labels.max()) + 1
    if int(train.labels.min()) == count - 1:
        raise RequestError("the labels of train name one class only: a classifier needs at least two")
    if int(test.labels.max()) >= count:
        raise RequestError(
            f"test has label {int(test.labels.max())}, train none above {count - 1}: add that class to train"
        )
    names = getattr(given, "classes", None)
    if isinstance(names, Sequence) and len(names) >= count:
        return tuple(map(str, names))
    return tuple(map(str, range(count)))
