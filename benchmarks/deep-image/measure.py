"""What each step of Deep Image's way brings: augmentation, dense evaluation with flips, an ensemble, and its student.

A small `deep_image` on Fashion-MNIST, several seeds; also how much of its accuracy a network loses on worse pictures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

import polyrhythm
from polyrhythm.api.train import prepare_process
from polyrhythm.data.open import open_data

MODEL = "deep_image(width=64, hidden=128, dropout=0.2, batch_norm=True)"
AUGMENT = (
    "crop(padding=2); flip; rotation(strength=8, probability=0.5); stretching(strength=0.1, probability=0.5)"
)
MEMBERS = 4
MIDDLE = 2
"""Of the five strengths, the middle one."""
HARMED_BY = ("rotation", "stretching", "lens_distortion", "vignetting")


class Bench:
    """Trains and tests on a part of Fashion-MNIST, in a folder of its own."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        dataset = open_data("fashion-mnist")
        train = torch.arange(min(arguments.images, len(dataset.train)))
        test = torch.arange(min(arguments.test_images, len(dataset.test)))
        self.data = tuple(
            (split.images(chosen), split.labels[chosen])
            for split, chosen in ((dataset.train, train), (dataset.test, test))
        )
        self.folder, self.arguments = folder, arguments

    def train(self, name: str, seed: int, **options: Any) -> Path:
        """Trains, and gives the run folder."""
        run = polyrhythm.train(
            data=self.data,
            model=MODEL,
            workers=1,
            epochs=self.arguments.epochs,
            schedule="cosine(warmup_epochs=1)",
            keep_checkpoints=0,
            seed=seed,
            out=self.folder / name,
            start_method="fork",
            **options,
        )
        assert run is not None
        return run.folder

    def error(self, runs: Path | list[Path], **options: Any) -> float:
        """Gives the test error in percent."""
        found = polyrhythm.evaluate(runs, data=self.data, model=MODEL, **options)
        return 100 * (1 - found["test_top1"])

    def seed(self, seed: int) -> dict[str, float]:
        """Gives the errors of all steps for one seed."""
        plain = self.train(f"{seed}-plain", seed)
        members = [
            self.train(f"{seed}-member{number}", 1000 * (number + 1) + seed, augment=AUGMENT)
            for number in range(MEMBERS)
        ]
        views = {"dense": True, "flip": True, "scales": self.arguments.scales}
        teachers = "; ".join(map(str, members))
        # a teacher says what its network is in its config.yaml, and its data are those of the student
        student = self.train(f"{seed}-distilled", seed, augment=AUGMENT, teacher=teachers)
        alone = [self.error(member) for member in members]
        robust = [self._loss(run) for run in (plain, members[0])]
        return {
            "plain": self.error(plain),
            "+ augmentation": alone[0],
            "+ flip": self.error(members[0], flip=True),
            "+ dense and flip": self.error(members[0], **views),
            "+ ensemble of 4": self.error(members, flip=True),
            "best member": min(self.error(member, flip=True) for member in members),
            "distilled": self.error(student, flip=True),
            "lost at the middle strength, plain": robust[0],
            "lost at the middle strength, augmented": robust[1],
        }

    def _loss(self, run: Path) -> float:
        """Gives the mean points of accuracy that augmentations of the middle strength cost."""
        (found,) = polyrhythm.robustness(run, data=self.data, model=MODEL, images=1000)["models"]
        lost = [
            found["clean_top1"] - each["top1"][MIDDLE]
            for each in found["declines"]
            if each["name"] in HARMED_BY
        ]
        return 100 * mean(lost)


def main() -> None:
    """Measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=60_000, help="training images")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--scales", type=lambda text: [int(part) for part in text.split(",")], default=[28, 32]
    )
    arguments = parser.parse_args()
    prepare_process()
    with TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), arguments)
        each = [bench.seed(seed) for seed in range(arguments.seeds)]
    report = {
        name: {
            "mean": round(mean(one[name] for one in each), 2),
            "deviation": round(stdev(one[name] for one in each), 2) if len(each) > 1 else None,
            "each": [round(one[name], 2) for one in each],
        }
        for name in each[0]
    }
    print(
        json.dumps(
            {
                "images": arguments.images,
                "test_images": arguments.test_images,
                "epochs": arguments.epochs,
                **report,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
