"""Test of a classifier: loss, top-1 and top-5 accuracy, and recall and precision of every class.

All of them follow from one confusion matrix and two sums, written here in plain torch: importing torchmetrics takes
more than a second, which every start of the command line would pay.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.data.dataset import TensorSplit, read_readable
from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from polyrhythm.data.dataset import Split
    from polyrhythm.data.loader import ImageWaits


_TENSORS = {"confusion": torch.int64, "predicted": torch.int64, "probability": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ClassResult:
    """Accuracy of one class.

    Attributes:
        recall: fraction of its images that are recognized; 0 if there are none.
        precision: fraction of the images predicted as this class that belong to it; 0 if none was predicted.
    """

    name: str
    images: int
    recall: float
    precision: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of a test of `images` images.

    Attributes:
        loss: mean cross-entropy, in nats.
        top1: fraction of images with the correct class as the most likely one.
        top5: fraction of images with the correct class among the five most likely (or all, if there are
            fewer).
        confusion: (classes, classes), int64; [i, j] is the number of images of class i predicted as class j.
        predicted: (images,), int64, the likeliest class of each.
        probability: (images,), float32, of that class.
    """

    loss: float
    top1: float
    top5: float
    images: int
    per_class: tuple[ClassResult, ...]
    confusion: Tensor = field(compare=False, repr=False)
    predicted: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64), compare=False, repr=False
    )
    probability: Tensor = field(default_factory=lambda: torch.empty(0), compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, JSON-able."""
        tensors = {name: getattr(self, name).tolist() for name in _TENSORS}
        return {**{name: getattr(self, name) for name in ("loss", "top1", "top5", "images")}, **tensors} | {
            "per_class": [asdict(entry) for entry in self.per_class]
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Evaluation:
        """Rebuild what `to_json` returned, bit for bit."""
        tensors = {name: torch.tensor(record[name], dtype=kind) for name, kind in _TENSORS.items()}
        per_class = tuple(ClassResult(**entry) for entry in record["per_class"])
        return cls(**{**record, **tensors, "per_class": per_class})

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes that have images: every class has the same weight, however rare it is."""
        recalls = [entry.recall for entry in self.per_class if entry.images]
        return sum(recalls) / len(recalls)

    @property
    def top1_interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of `top1` (E. Wilson, JASA 22, 1927), as for independent images."""
        return share_interval(self.top1, self.images)

    @property
    def class_figures(self) -> list[dict[str, Any]]:
        """Name, images, recall, precision, and 95 % confidence interval of the recall of every class."""
        return [
            asdict(entry) | {"recall_interval": list(share_interval(entry.recall, entry.images))}
            for entry in self.per_class
        ]

    @property
    def guesses(self) -> str:
        """A warning where the network is hardly better than a guess from the class frequencies; else empty.

        Such a guess has the entropy of the classes as its loss, and as its top-1 the share of the largest
        class. There is no warning for fewer than a hundred images.
        """
        if self.images < 100:
            return ""
        shares = self.confusion.sum(1).double() / max(self.images, 1)
        entropy, largest = float(torch.special.entr(shares).sum()), float(shares.max())
        if not entropy or self.loss < 0.97 * entropy or self.top1 > min(1.25 * largest, (1 + largest) / 2):
            return ""
        return (
            f"the network hardly does better than guessing: loss {self.loss:.3f} (guessing: {entropy:.3f}), top-1 "
            f"{100 * self.top1:.1f} % ({100 * largest:.1f} %). Try a learning rate ten times lower or higher, or "
            "smaller batches, which make more steps"
        )

    def confused(self, most: int = 10) -> list[dict[str, Any]]:
        """Return the most frequent mistakes, each with its `class`, what it was `taken_for`, and the `images`."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        names = [entry.name for entry in self.per_class]
        likeliest = wrong.flatten().topk(min(most, wrong.numel()))
        return [
            {"class": names[pair // len(names)], "taken_for": names[pair % len(names)], "images": images}
            for images, pair in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
            if images
        ]


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share of `count` independent cases (E. Wilson, JASA 22, 1927)."""
    z, n, p = 1.959964, count, share
    if not n:
        return 0.0, 1.0
    center, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (center - half) / (1 + z * z / n)), min(1.0, (center + half) / (1 + z * z / n))


@dataclass(frozen=True, kw_only=True)
class PartialEvaluation:
    """Test result of some consecutive batches of a split.

    Attributes:
        first: number of the first of them.
        losses: (batches,) float64, sums of the cross-entropy of each.
        in_top5: (batches,) int64, images of each batch with the correct class among the five most likely.
        predicted: (images,) int64, the likeliest class of each; -1: the image was left out, as it could not be read.
        probability: (images,) float32, of that class.
    """

    first: int
    losses: Tensor
    in_top5: Tensor
    predicted: Tensor
    probability: Tensor

    @property
    def batches(self) -> range:
        """Numbers of the batches."""
        return range(self.first, self.first + len(self.losses))

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it as named tensors."""
        first = torch.tensor(self.first)
        return {name: value for name, value in vars(self).items() if name != "first"} | {"first": first}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> PartialEvaluation:
        """Unpack the result of `tensors`."""
        return cls(**tensors | {"first": int(tensors["first"])})  # type: ignore[arg-type]


def disjoint(parts: Sequence[PartialEvaluation]) -> list[PartialEvaluation]:
    """Return the parts without those that have a batch of an earlier one."""
    kept: list[PartialEvaluation] = []
    tested: set[int] = set()
    for part in parts:
        if tested.isdisjoint(part.batches):
            kept.append(part)
            tested.update(part.batches)
    return kept


@dataclass(frozen=True)
class InDtype:
    """A split with images in the model's dtype, as in training.

    Attributes:
        split: the images as they are.
        dtype: dtype of the model.
        waits: time for which images that are not in memory were waited for.
    """

    split: Split
    dtype: torch.dtype
    waits: ImageWaits

    def __len__(self) -> int:
        return len(self.split)

    @property
    def labels(self) -> Tensor:
        """As they are."""
        return self.split.labels

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of these indices, (B, C, H, W)."""
        if isinstance(self.split, TensorSplit):
            return self.split.images(indices).to(self.dtype)
        return self.waits.of(lambda: self.split.images(indices)).to(self.dtype)


_NOT_READ = -1
"""Predicted class of an image that could not be read, and was left out."""

BATCH_SIZE = 500
"""Images that are tested at a time."""


def batches_for(images: int, place: int, parts: Sequence[int]) -> range:
    """Return the batches of a test of `images` images that one of several workers takes, by their relative shares."""
    batches, whole = -(-images // BATCH_SIZE), sum(parts)
    return range(batches * sum(parts[:place]) // whole, batches * sum(parts[: place + 1]) // whole)


def evaluate_part(
    model: nn.Module,
    split: Split,
    batches: range,
    *,
    classes: Sequence[str],
    device: torch.device | str = "cpu",
) -> PartialEvaluation:
    """Test a model on some batches of a split, of those that `evaluate` makes of it.

    Args:
        model: see `evaluate`.
        split: see `evaluate`.
        batches: numbers of the batches.
        classes: see `evaluate`.
        device: see `evaluate`.
    """
    totals = _Totals(len(classes))
    with in_evaluation_mode(model):
        for batch in batches:
            indices = torch.arange(batch * BATCH_SIZE, min((batch + 1) * BATCH_SIZE, len(split)))
            totals.add_readable(lambda some: model(split.images(some).to(device)), indices, split.labels)
    return totals.part(batches.start)


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    classes: Sequence[str],
    batch_size: int = BATCH_SIZE,
    device: torch.device | str = "cpu",
    tested: Sequence[PartialEvaluation] = (),
) -> Evaluation:
    """Test a model that maps (B, C, H, W) to logits on all images of a split, in evaluation mode.

    Args:
        model: model on `device`; returned to the mode that it was in.
        split: the images and their labels.
        classes: names of the classes, in the order of the labels.
        batch_size: images at a time; affects only the speed.
        device: device where the model is.
        tested: results of others for the same model and other batches; the result has the same bits.

    Raises:
        RequestError: the split is empty, or the model was made for another number of classes.
    """

    def logits(indices: Tensor) -> Tensor:
        scores: Tensor = model(split.images(indices).to(device))
        return scores

    with in_evaluation_mode(model):
        return evaluate_scores(logits, split.labels, classes=classes, batch_size=batch_size, tested=tested)


@contextmanager
def in_evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode without gradients, and restore their modes afterwards."""
    modules = [module for model in models for module in model.modules()]
    training = [module.training for module in modules]
    for model in models:
        model.eval()
    try:
        # not inference mode: tensors that a network caches in such a pass cannot be used in training
        with torch.no_grad():
            yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag


def evaluate_scores(
    scores: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    classes: Sequence[str],
    batch_size: int = BATCH_SIZE,
    tested: Sequence[PartialEvaluation] = (),
) -> Evaluation:
    """Test a function from numbers of images (B,) int64 to logits or log probabilities (B, classes).

    Args:
        scores: the function.
        labels: labels of all images.
        classes: names of the classes, in the order of the labels.
        batch_size: images at a time.
        tested: results of others for other batches.

    Raises:
        RequestError: there are no images, or scores for another number of classes.
    """
    if len(labels) == 0:
        raise RequestError("there are no images to test on")
    assert not tested or batch_size == BATCH_SIZE, "others have tested batches of that size"
    totals, by_others = _Totals(len(classes)), {batch: part for part in tested for batch in part.batches}
    for batch, indices in enumerate(torch.split(torch.arange(len(labels)), batch_size)):
        if batch in by_others:
            totals.take(by_others[batch], batch)
            continue
        totals.add_readable(scores, indices, labels)
    return totals.result(classes, labels)


class _Totals:
    """Running totals over batches; they stay on the device, so that nothing synchronizes with it."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._losses: list[Tensor] = []
        self._in_top5: list[Tensor] = []
        self._predicted: list[Tensor] = []
        self._probability: list[Tensor] = []

    def add_readable(self, scores: Callable[[Tensor], Tensor], indices: Tensor, labels: Tensor) -> None:
        """Add a batch without the images that cannot be read."""
        readable, found = read_readable(scores, indices)
        self.add(found, labels[readable].to(found.device))
        if len(readable) < len(indices):
            there = torch.isin(indices, readable).to(found.device)
            for column, none in ((self._predicted, _NOT_READ), (self._probability, 0)):
                whole = column[-1].new_full((len(indices),), none)
                whole[there] = column[-1]
                column[-1] = whole

    def add(self, logits: Tensor, labels: Tensor) -> None:
        if logits.shape[1] != self._classes:
            raise RequestError(
                f"the model has {logits.shape[1]} classes, but the data have {self._classes}: "
                "give the data that it was trained on"
            )
        self._losses.append(functional.cross_entropy(logits, labels, reduction="none").double().sum())
        likeliest = logits.topk(min(5, self._classes)).indices
        self._in_top5.append((likeliest == labels[:, None]).sum())
        self._predicted.append(logits.argmax(dim=1))
        self._probability.append(functional.softmax(logits.float(), dim=1).amax(dim=1))

    def take(self, part: PartialEvaluation, batch: int) -> None:
        """Add a batch that another has tested."""
        place = batch - part.first
        images = slice(place * BATCH_SIZE, (place + 1) * BATCH_SIZE)
        self._losses.append(part.losses[place])
        self._in_top5.append(part.in_top5[place])
        self._predicted.append(part.predicted[images])
        self._probability.append(part.probability[images])

    def part(self, first: int) -> PartialEvaluation:
        """Return the sums so far as the part of the test that begins at batch `first`."""
        none = torch.empty(0, dtype=torch.int64)
        return PartialEvaluation(
            first=first,
            losses=torch.tensor([loss.item() for loss in self._losses], dtype=torch.float64),
            in_top5=torch.tensor([int(count) for count in self._in_top5], dtype=torch.int64),
            predicted=torch.cat([none, *(each.cpu() for each in self._predicted)]),
            probability=torch.cat([torch.empty(0), *(each.cpu() for each in self._probability)]),
        )

    def result(self, names: Sequence[str], labels: Tensor) -> Evaluation:
        whole = self.part(0)
        read = whole.predicted != _NOT_READ
        images = int(read.sum())
        if not images:
            raise RequestError("none of the test images can be read: bring them back, or name other data")
        pairs = labels.cpu()[read] * self._classes + whole.predicted[read]
        confusion = torch.bincount(pairs, minlength=self._classes**2).view(self._classes, self._classes)
        return Evaluation(
            loss=sum(whole.losses.tolist()) / images,  # in the order of the batches
            top1=int(confusion.trace()) / images,
            top5=int(whole.in_top5.sum()) / images,
            images=images,
            per_class=_per_class(names, confusion),
            confusion=confusion,
            predicted=whole.predicted,
            probability=whole.probability,
        )


def _per_class(names: Sequence[str], confusion: Tensor) -> tuple[ClassResult, ...]:
    right, of_class, taken_for = (
        confusion.diagonal().tolist(),
        confusion.sum(1).tolist(),
        confusion.sum(0).tolist(),
    )
    return tuple(
        ClassResult(
            name=name,
            images=of_class[index],
            recall=right[index] / max(of_class[index], 1),
            precision=right[index] / max(taken_for[index], 1),
        )
        for index, name in enumerate(names)
    )
