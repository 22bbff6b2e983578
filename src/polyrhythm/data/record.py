"""Record of the data that a network was trained on, which every verb compares before it computes anything.

    RUN/data.json            everything below, with the names of the held-out images and of those that were trained on
    checkpoints, models      the same without names of images

A network's outputs have the order of its classes, so classes are matched by name. Classes without names, which are
numbers from 0, are matched by number.

Names of images are paths relative to the folder of the classes, with `/`, in Unicode's form NFC.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.data.dealing import Sides
from polyrhythm.errors import RequestError, printable
from polyrhythm.run_files import MOST_LISTING_BYTES, exists_in_run, read_json_in_run

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.data.dataset import Dataset, Split

DATA_FILE = "data.json"
METADATA_KEY = "trained_on"
"""Key of the record in the metadata of a weights file, and in a checkpoint's facts."""
_FORMAT = 1
_NAMED = 3
"""Classes that an error names."""


@dataclass(frozen=True)
class DataRecord:
    """Record of the data that a network was trained on.

    Attributes:
        data: name of the data.
        classes: names, in the order of the network's outputs.
        image_shape: (C, H, W); empty: not recorded.
        train: number of training images; -1: not recorded.
        test: number of test images; -1: not recorded.
        listing: SHA-256 of the classes and names of all images, in hexadecimal digits; empty: not recorded.
        held_out: whether the test images were held out of the training images.
        sides: names of the held-out images and of those that were trained on; None: not recorded.
    """

    data: str
    classes: tuple[str, ...]
    image_shape: tuple[int, ...] = ()
    train: int = -1
    test: int = -1
    listing: str = ""
    held_out: bool = False
    sides: Sides | None = None

    @classmethod
    def of(cls, dataset: Dataset) -> DataRecord:
        """Return the record of a data set."""
        names = dataset.names
        return cls(
            dataset.name,
            dataset.classes,
            tuple(dataset.image_shape),
            len(dataset.train),
            len(dataset.test),
            dataset.listing_sha256,
            dataset.held_out,
            Sides(*map(frozenset, names)) if dataset.held_out and names is not None else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything but the names of images, JSON-able."""
        return {
            "data": self.data,
            "classes": list(self.classes),
            "image_shape": list(self.image_shape),
            "images": {"train": self.train, "test": self.test},
            "listing_sha256": self.listing,
            "held_out": self.held_out,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> DataRecord:
        """Inverse of `to_json`, with the names of images if it has them.

        Raises:
            RequestError: a value is missing or of another type; `where` names the file.
        """
        if not isinstance(values, dict):
            raise _damaged(where)
        images = values.get("images")
        sides = None
        if "trained" in values:
            lists = _names(values.get("trained")), _names(values.get("held_out_images"))
            if lists[0] is None or lists[1] is None:
                raise _damaged(where)
            sides = Sides(frozenset(lists[0]), frozenset(lists[1]))
        classes, shape = _names(values.get("classes")), values.get("image_shape")
        if (
            classes is None
            or not isinstance(values.get("data"), str)
            or not isinstance(values.get("listing_sha256"), str)
            or not isinstance(values.get("held_out"), bool)
            or not isinstance(images, dict)
            or not all(type(images.get(part)) is int for part in ("train", "test"))
            or not isinstance(shape, list)
            or not all(type(side) is int for side in shape)
        ):
            raise _damaged(where)
        return cls(
            values["data"],
            classes,
            tuple(shape),
            images["train"],
            images["test"],
            values["listing_sha256"],
            values["held_out"],
            sides,
        )

    def file_text(self) -> str:
        """Return the text of `data.json`."""
        values: dict[str, Any] = {"format": _FORMAT, **self.to_json()}
        if self.sides is not None:
            values["trained"] = sorted(self.sides.trained)
            values["held_out_images"] = sorted(self.sides.held_out)
        return json.dumps(values, indent=1) + "\n"

    def matched(self, dataset: Dataset, network: str) -> Dataset:
        """Return the same data with the labels and classes of the network.

        Args:
            dataset: data; some of the network's classes may be missing.
            network: path of the network, for errors.

        Raises:
            RequestError: the data have classes that the network does not know, or other image channels.
        """
        self._check_channels(dataset, network)
        if dataset.classes == self.classes:
            return dataset
        if _are_numbers(dataset.classes) or _are_numbers(self.classes):
            fewer = len(dataset.classes) < len(self.classes) and _are_numbers(dataset.classes)
            if fewer or len(dataset.classes) == len(self.classes):
                return replace(dataset, classes=self.classes)
        strange = _without(dataset.classes, self.classes)
        if strange:
            raise RequestError(
                f"{network} was trained on {self._known}, and {dataset.name} has {_listed(strange)}, which it does not "
                "know: name data with the classes that it knows, or train again"
            )
        place = torch.tensor([self.classes.index(name) for name in dataset.classes])
        train, test = (relabeled(split, place) for split in (dataset.train, dataset.test))
        return replace(dataset, train=train, test=test, classes=self.classes)

    def continued(self, dataset: Dataset, run: str) -> Dataset:
        """Return the data with which a run continues: those of `matched`, with an image of every class.

        Raises:
            RequestError: the data have other classes than the run.
        """
        unnamed = _are_numbers(dataset.classes) or _are_numbers(self.classes)
        if unnamed and len(dataset.classes) != len(self.classes):
            raise RequestError(
                f"{run} was trained on {len(self.classes)} classes, and {dataset.name} has {len(dataset.classes)}: "
                "name the same data, or start a new run"
            )
        lacking, strange = (
            _without(self.classes, dataset.classes),
            _without(dataset.classes, self.classes),
        )
        if (lacking or strange) and not unnamed:
            differs = [f"lacks {_listed(lacking)}"] * bool(lacking) + [f"has {_listed(strange)}"] * bool(
                strange
            )
            raise RequestError(
                f"{run} was trained on {self._known}, and {dataset.name} {' and '.join(differs)}: bring the classes "
                "back under their names, or start a new run"
            )
        return self.matched(dataset, run)

    def order_of(self, classes: Sequence[str], network: str) -> Tensor | None:
        """Return the index of the network's output for each class of the data, (K,) int64; None: the order is the same.

        Args:
            classes: classes of the data.
            network: path of the network, for errors.

        Raises:
            RequestError: the network has other classes.
        """
        given = tuple(classes)
        if given == self.classes:
            return None
        if len(given) == len(self.classes) and (_are_numbers(given) or _are_numbers(self.classes)):
            return None
        strange, lacking = _without(given, self.classes), _without(self.classes, given)
        if strange or lacking:
            differs = f"the data have {_listed(strange)}" if strange else f"the data lack {_listed(lacking)}"
            raise RequestError(
                f"{network} was trained on {self._known}, and {differs}: name a network that was trained on the same "
                "classes"
            )
        return torch.tensor([self.classes.index(name) for name in given])

    @property
    def _known(self) -> str:
        return f"{len(self.classes)} classes ({_listed(self.classes)})"

    def _check_channels(self, dataset: Dataset, network: str) -> None:
        if self.image_shape and self.image_shape[0] != dataset.image_shape[0]:
            raise RequestError(
                f"{network} was trained on images of {self.image_shape[0]} channels, and those of {dataset.name} have "
                f"{dataset.image_shape[0]}: name other data"
            )

    def with_earlier(self, earlier: DataRecord | None) -> DataRecord:
        """Return the record with the images of an earlier one added: images that are missing now may return."""
        if earlier is None or earlier.sides is None:
            return self
        now = self.sides or Sides(frozenset(), frozenset())
        trained = now.trained | earlier.sides.trained
        return replace(self, sides=Sides(trained, (now.held_out | earlier.sides.held_out) - trained))

    def changes(self, dataset: Dataset) -> str:
        """Return the change of the data since training, as a clause; empty: none that the record shows."""
        now = DataRecord.of(dataset)
        if not self.listing or now.listing == self.listing or self.data != now.data:
            return ""
        if self.sides is not None and now.sides is not None:
            before, after = self.sides.all, now.sides.all
            return f"{len(after - before):,} images are new, and {len(before - after):,} are gone"
        if (self.train, self.test) == (now.train, now.test):
            return "as many images have other names or classes"
        return (
            f"there were {self.train:,} training and {self.test:,} test images, and now there are {now.train:,} and "
            f"{now.test:,}"
        )


def _damaged(where: str) -> RequestError:
    return RequestError(f"{where} is damaged: take it from a backup, or remove it")


def _names(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return None
    return tuple(value)


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    known = frozenset(others)
    return [name for name in names if name not in known]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return printable(", ".join(names[:_NAMED])) + more


def _are_numbers(classes: Sequence[str]) -> bool:
    """Whether classes have no names: they are the numbers from 0, in order."""
    return all(name == str(number) for number, name in enumerate(classes))


def relabeled(split: Split, place: Tensor) -> Split:
    """Return the same images with other labels.

    Args:
        split: split with labels from 0 to K - 1.
        place: (K,) int64, the new label of each.

    Raises:
        RequestError: the labels cannot be replaced.
    """
    made: Any = copy.copy(split)
    larger = getattr(split, "larger", None)
    try:
        if larger is not None:
            made.larger = relabeled(larger, place)
        made.labels = place[split.labels]
    except AttributeError:
        raise RequestError(
            f"the classes of a {type(split).__name__} are in another order than the network's: give them in its order"
        ) from None
    found: Split = made
    return found


def read_record(folder: Path) -> DataRecord | None:
    """Return the record of a run folder; None: the folder has none, as of runs before there were any.

    Raises:
        RequestError: the file is damaged.
    """
    path = folder / DATA_FILE
    if not exists_in_run(path):
        return None
    try:
        values = read_json_in_run(path, MOST_LISTING_BYTES)
    except OSError as error:
        raise RequestError(f"cannot read {path} ({error.strerror}): give a folder that can be read") from None
    if values.get("format") != _FORMAT:
        raise RequestError(
            f"{path} has format {values.get('format')!r:.50}, and this version reads {_FORMAT}"
        )
    return DataRecord.from_json(values, str(path))
