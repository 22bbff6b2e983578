"""Classification of images, for the verb `predict`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Unpack

import torch
from torch import Tensor

from polyrhythm.api.served import ImageFiles, Served, load_served
from polyrhythm.config.run_config import NetworkOptions, PredictOptions, refuse_unknown
from polyrhythm.config.trained import voters
from polyrhythm.data.image_files import find_unreadable, image_files
from polyrhythm.errors import RequestError, RunError
from polyrhythm.escaping import csv_cell
from polyrhythm.evaluation.calibration import LEAST, MOST, tempered
from polyrhythm.evaluation.ensemble import average
from polyrhythm.evaluation.evaluate import in_evaluation_mode
from polyrhythm.evaluation.views import ViewedClassifier, Views
from polyrhythm.user_files import check_output

_BATCH = 64
_FORMATS = (".csv", ".json")

Progress = Callable[[int, int], None]
"""Receives the number of completed images, and the number of all."""


def predict(
    images: str | Path | Sequence[str | Path],
    weights: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    device: str = "auto",
    temperature: float | None = None,
    none_below: float = 0.0,
    skip_unreadable: bool = False,
    out: str | Path | None = None,
    progress: Progress = lambda done, all_: None,
    **options: Unpack[PredictOptions],
) -> dict[str, Any]:
    """Return the most likely classes of images.

    Args:
        images: files; a folder stands for the files in it.
        weights: a run folder or a file of weights; several are listed side by side, and averaged.
        top: number of classes per image.
        device: `cpu`, `cuda` or `auto`.
        temperature: temperature of the probabilities of all networks together; None: each network's own, as
            `evaluate` with
            `calibrate` has found it for these views, else 1.
        none_below: minimum probability of the most likely class; below it, the image is classified as none of the
            classes.
        skip_unreadable: leave out images that cannot be read.
        out: a file to write, .csv (a row an image) or .json (what is returned).
        progress: receiver of the progress.
        **options: `data` and `model`, if the weights do not record them; `dense`, `ten_crop`, `flip` and `scales`, as
            for `evaluate`.

    Returns:
        `weights`; `images`: for each its `image`, `classes` (of all networks together), a list of `class` and
        `probability`, most likely first, `none_of_these`, and `networks`, one such list each; `views` and `dense`,
        unless the only view is the image itself; `temperatures`, one a network; `unreadable`, a list of `image` and
        `reason`; `out`.

    Raises:
        RequestError: no such image, or one that cannot be read; networks for different classes.
        RunError: the file cannot be written.
    """
    refuse_unknown(options, PredictOptions)
    networks = Networks.load(weights, device, temperature, none_below, options)
    path = None if out is None else _checked(Path(out))
    files = _files([images] if isinstance(images, str | Path) else images)
    broken = find_unreadable([str(file) for file in files])
    if broken and not skip_unreadable:
        name, reason = next(iter(broken.items()))
        raise RequestError(
            f"{name} cannot be read ({reason}): repair it, or leave it out, with --skip-unreadable"
        )
    readable = [file for file in files if str(file) not in broken]
    found: list[dict[str, Any]] = []
    for entry in networks.described(readable, top):
        found.append(entry)
        if len(found) % _BATCH == 0 or len(found) == len(readable):
            progress(len(found), len(readable))
    result = networks.facts() | {
        "images": found,
        "unreadable": [{"image": name, "reason": reason} for name, reason in broken.items()],
        "out": None if path is None else str(path),
    }
    if path is not None:
        _write(path, result, min(top, len(networks.classes)))
    return result


@dataclass(frozen=True)
class Networks:
    """Networks that name what images show, together.

    Attributes:
        served: the networks.
        views: views of each image.
        temperature: temperature of their probabilities together; None: each has its own.
        none_below: probability of the likeliest class below which an image shows none of them.
        classifiers: one a network, over no images.
    """

    served: list[Served]
    views: Views
    temperature: float | None
    none_below: float
    classifiers: list[ViewedClassifier]

    @classmethod
    def load(
        cls,
        weights: str | Path | Sequence[str | Path],
        device: str,
        temperature: float | None,
        none_below: float,
        options: PredictOptions,
    ) -> Networks:
        """Open networks; for the arguments see `predict`.

        Raises:
            RequestError: there are no such weights, they are for different classes, or a number is out of its range.
        """
        if temperature is not None and not LEAST <= temperature <= MOST:
            raise RequestError(f"temperature {temperature:g} is none: give {LEAST:g} to {MOST:g}")
        if not 0 <= none_below <= 1:
            raise RequestError(f"none_below {none_below:g} is no probability: give 0 to 1")
        asked: dict[str, Any] = {**options}
        views = Views.taken_from(asked)
        named = [weights] if isinstance(weights, str | Path) else list(weights)
        paths = [path for each in named for path in voters(Path(each))]
        of_network: NetworkOptions = {"data": asked.get("data"), "model": asked.get("model")}
        served = [load_served(path, device=device, **of_network) for path in paths]
        for other in served[1:]:
            if other.classes != served[0].classes:
                raise RequestError(
                    f"{other.weights} and {served[0].weights} know different classes: ask them one at a time"
                )
        classifiers = [each.classifier(views) for each in served]
        return cls(served, views, temperature, none_below, classifiers)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.served[0].classes

    def facts(self) -> dict[str, Any]:
        """Return the facts common to all images: networks, temperatures and views."""
        alike = self.temperature
        own = [each.temperature(self.views) if alike is None else alike for each in self.served]
        found: dict[str, Any] = {"weights": [str(each.weights) for each in self.served], "temperatures": own}
        if not self.views.plain:
            found["views"] = self.views.to_json()
        if self.views.dense:
            found["dense"] = [each.method for each in self.classifiers]
        return found

    def described(self, files: Sequence[Path | IO[bytes]], top: int) -> Iterator[dict[str, Any]]:
        """Yield each image's result: `image`, `classes`, `none_of_these` and `networks`, as `predict` returns them.

        Raises:
            RequestError: one cannot be read.
        """
        seeing = [
            (
                each.temperature(self.views) if self.temperature is None else 1.0,
                classifier.over(ImageFiles(files, each.preprocessing)),
            )
            for each, classifier in zip(self.served, self.classifiers, strict=True)
        ]
        for indices in torch.arange(len(files)).split(_BATCH):
            with in_evaluation_mode(*(each.network for each in self.served)):
                each = [tempered(classifier.probabilities(indices).cpu(), own) for own, classifier in seeing]
            together = average(each)
            if self.temperature is not None:
                together = tempered(together, self.temperature)
                each = [together] if len(each) == 1 else each
            for row, index in enumerate(indices.tolist()):
                listed = self._listed(together[row], top)
                yield {
                    "image": str(files[index]) if isinstance(files[index], Path) else "",
                    "classes": listed,
                    "none_of_these": listed[0]["probability"] < self.none_below,
                    "networks": [self._listed(one[row], top) for one in each],
                }

    def _listed(self, probabilities: Tensor, top: int) -> list[dict[str, Any]]:
        likeliest = probabilities.topk(min(top, len(self.classes)))
        return [
            {"class": self.classes[index], "probability": probability}
            for probability, index in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
        ]


def _files(given: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, given):
        if not path.exists():
            raise RequestError(f"there is no image {path}: name a file or a folder of files")
        inside = [Path(file) for file in image_files(path)] if path.is_dir() else [path]
        if not inside:
            raise RequestError(f"there are no images in {path}: name files, or a folder that holds some")
        found += inside
    if not found:
        raise RequestError("there are no images to classify: name files, or a folder that holds some")
    return found


def _checked(path: Path) -> Path:
    if path.suffix.lower() not in _FORMATS:
        raise RequestError(f"{path} is neither a table nor JSON by its ending: name it .csv or .json")
    check_output(path)
    return path


def _write(path: Path, result: dict[str, Any], top: int) -> None:
    """Write the results; a table has one row per image, the likeliest class first."""
    try:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", "utf-8")
            return
        with path.open("w", encoding="utf-8", newline="") as opened:
            writer = csv.writer(opened)
            more = [f"{name}_{place}" for place in range(2, top + 1) for name in ("class", "probability")]
            writer.writerow(["image", "none_of_these", "class", "probability", *more])
            for entry in result["images"]:
                pairs = [[csv_cell(each["class"]), f"{each['probability']:.6g}"] for each in entry["classes"]]
                none = "true" if entry["none_of_these"] else "false"
                writer.writerow(
                    [csv_cell(entry["image"]), none, *(value for pair in pairs for value in pair)]
                )
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
