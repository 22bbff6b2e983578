"""What each step of Deep Image's way brings: augmentation, dense evaluation with flips, an ensemble, and its student.

    python benchmarks/deep-image/measure.py train --folder runs/deep-image       # networks that are there stay
    python benchmarks/deep-image/measure.py test  --folder runs/deep-image --out results.json

A small `deep_image` on a part of Fashion-MNIST, several seeds; also how much of its accuracy a network loses on worse
pictures. Trained networks stay in the folder, so that they can be tested anew.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import polyrhythm
from polyrhythm.api.train import prepare_process
from polyrhythm.data.open import open_data

MODEL = "deep_image(width=64, hidden=128, dropout=0.2, batch_norm=True)"
AUGMENT = (
    "crop(padding=2); flip; rotation(strength=15, probability=0.3); stretching(strength=0.2, probability=0.3); "
    "lens_distortion(strength=0.2, probability=0.2); vignetting(probability=0.2)"
)
MEMBERS, NETWORKS, APART = 4, 6, 2
"""A seed's ensemble begins so many networks after that of the seed before: neighbors share half of their members."""
STUDENT, PLAIN = "distilled", "plain"
SEEN_IN_TRAINING = 100
"""Test pictures that are looked at after every epoch; errors are those of all of them, later."""

MIDDLE = 2
"""Of the five strengths, the middle one."""
HARMED_BY = ("rotation", "stretching", "lens_distortion", "vignetting")


@dataclass(frozen=True)
class Size:
    """How much is trained and tested.

    Attributes:
        images: training pictures.
        test_images: how many are tested with.
        epochs: passes over them.
        seeds: how many.
        scales: lengths of a test picture's side, in pixels.
    """

    images: int
    test_images: int
    epochs: int
    seeds: int
    scales: tuple[int, ...]


class Bench:
    """Trains and tests on a part of Fashion-MNIST.

    Args:
        folder: holds the run folders.
        size: how much.
    """

    def __init__(self, folder: Path, size: Size) -> None:
        dataset = open_data("fashion-mnist")
        chosen, test = torch.arange(size.images), torch.arange(size.test_images)
        self.learned = (dataset.train.images(chosen), dataset.train.labels[chosen])
        self.tested = (dataset.test.images(test), dataset.test.labels[test])
        self.folder, self.size = folder, size

    def train(self, seed: int, *, student: bool = True) -> None:
        """Trains the networks of a seed that are not there."""
        self._train(f"{seed}-{PLAIN}", seed)
        for number in self._numbers(seed):
            self._train(f"member{number}", 1000 + number, augment=AUGMENT)
        if student:
            teachers = "; ".join(str(member) for member in self.members(seed))
            self._train(f"{seed}-{STUDENT}", seed, augment=AUGMENT, teacher=teachers)

    def members(self, seed: int) -> list[Path]:
        """Return the run folders of an ensemble."""
        return [self.folder / f"member{number}" for number in self._numbers(seed)]

    def _numbers(self, seed: int) -> list[int]:
        return [(APART * seed + number) % NETWORKS for number in range(MEMBERS)]

    def _train(self, name: str, seed: int, **options: Any) -> None:
        if (self.folder / name / "model.safetensors").exists():
            return
        started_s = time.monotonic()
        images, labels = self.tested
        polyrhythm.train(
            data=(self.learned, (images[:SEEN_IN_TRAINING], labels[:SEEN_IN_TRAINING])),
            model=MODEL,
            workers=1,
            threads=1,
            epochs=self.size.epochs,
            schedule="cosine(warmup_epochs=1)",
            keep_checkpoints=0,
            seed=seed,
            out=self.folder / name,
            start_method="fork",
            **options,
        )
        print(name, round(time.monotonic() - started_s), "s", flush=True)

    def error(self, runs: Path | list[Path], **options: Any) -> float:
        """Return the test error in percent."""
        return _error(self._tested(runs, **options))

    def _tested(self, runs: Path | list[Path], **options: Any) -> dict[str, Any]:
        return polyrhythm.evaluate(runs, data=(self.learned, self.tested), model=MODEL, **options)

    def test(self, seed: int) -> dict[str, float]:
        """Return the errors of all steps for one seed."""
        members, student = self.members(seed), self.folder / f"{seed}-{STUDENT}"
        views = {"dense": True, "flip": True, "scales": list(self.size.scales)}
        together = self._tested(members, **views)
        seen = [_error(member) for member in together["members"]]
        lost = [self._lost(run) for run in (self.folder / f"{seed}-{PLAIN}", members[0])]
        found = {
            "plain": self.error(self.folder / f"{seed}-{PLAIN}"),
            "+ augmentation": self.error(members[0]),
            "+ flip": self.error(members[0], flip=True),
            "+ dense and flip": seen[0],
            "+ ensemble of 4": _error(together),
            "best member": min(seen),
            "mean member": mean(seen),
            "lost at the middle strength, plain": lost[0],
            "lost at the middle strength, augmented": lost[1],
        }
        if student.exists():
            found |= {"distilled": self.error(student, **views), "distilled, seen once": self.error(student)}
        return found

    def _lost(self, run: Path) -> float:
        """Return the mean points of accuracy that augmentations of the middle strength cost."""
        data = (self.learned, self.tested)
        (found,) = polyrhythm.robustness(
            run, data=data, model=MODEL, images=self.size.test_images, kinds=HARMED_BY
        )["models"]
        return 100 * mean(found["clean_top1"] - each["top1"][MIDDLE] for each in found["declines"])


def _error(tested: dict[str, Any]) -> float:
    return 100 * (1 - float(tested["test_top1"]))


def summary(each: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return mean and deviation over seeds of every figure, and the figures themselves."""
    found = {}
    for name in dict.fromkeys(name for one in each for name in one):
        values = [one[name] for one in each if name in one]
        found[name] = {
            "mean": round(mean(values), 2),
            "deviation": round(stdev(values), 2) if len(values) > 1 else None,
            "each": [round(value, 2) for value in values],
        }
    return found


def main() -> None:
    """Trains, or tests and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "test"))
    parser.add_argument("--folder", type=Path, required=True, help="of the trained networks")
    parser.add_argument("--images", type=int, default=10_000, help="training images")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--students", type=int, default=3, help="of so many seeds a student is trained")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scales", type=int, nargs="+", default=[28, 32])
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    chosen = parser.parse_args()
    prepare_process()
    size = Size(chosen.images, chosen.test_images, chosen.epochs, chosen.seeds, tuple(chosen.scales))
    bench = Bench(chosen.folder, size)
    if chosen.what == "train":
        for seed in range(size.seeds):
            bench.train(seed, student=seed < chosen.students)
        return
    report = {"model": MODEL, "augment": AUGMENT, **asdict(size)}
    figures = summary([bench.test(seed) for seed in range(size.seeds)])
    text = json.dumps(report | {"test_error_percent": figures}, indent=2)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
