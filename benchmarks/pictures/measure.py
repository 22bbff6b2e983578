"""Fine-tuning with every option at its default, on three kinds of pictures, beside a linear probe of the same backbone.

    photographs   a class is a landscape; windows of its left part are learned, windows of its right part tested
    stamps        drawings and cut-out photographs of animals, food, …; three tenths of each class are tested
    surfaces      brick, gravel, grass, tissue, …, gray or in color; windows as of the landscapes, 64 pixels a side

The probe is scikit-learn's multinomial logistic regression on the frozen features of the plain pictures, its strength
chosen by 5-fold cross-validation, tested on the same pictures. `--killed` trains with four workers of which one is
killed while the body thaws.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegressionCV

from polyrhythm.data.open import open_data
from polyrhythm.models.create import create_model
from polyrhythm.models.features import feature_function
from polyrhythm.models.fine_tuning import start_from

MODEL, WEIGHTS = "timm.tf_efficientnet_lite0", "efficientnet_lite0"
STAMPS = ("animals", "food", "household", "plants", "seasonal", "town", "vehicles")
SURFACES = ("brick", "cell", "coins", "grass", "gravel", "ihc", "moon", "text")
LEFT = 0.55  # of the width is for training
LONGEST_S = 600.0
INTO_ROUND_S = 4.0

Picture = tuple[str, str, Image.Image]
"""`train` or `test`, a class, and a picture."""


def photographs(packages: Path, draw: np.random.Generator) -> Iterator[Picture]:
    """Yield windows of the landscapes of the package mate-backgrounds."""
    for path in sorted((packages / "usr/share/backgrounds/mate/nature").glob("*.jpg")):
        with Image.open(path) as image:
            whole = image.convert("RGB")
        whole.thumbnail((1600, 1600))
        yield from _windows(path.stem, whole, (0.25, 0.45), draw, {"train": 20, "test": 20})


def stamps(packages: Path, draw: np.random.Generator) -> Iterator[Picture]:
    """Yield the pictures of the package tuxpaint-stamps-default in seven of its folders."""
    for name in STAMPS:
        files = sorted((packages / "usr/share/tuxpaint/stamps" / name).rglob("*.png"))
        for place, number in enumerate(draw.permutation(len(files))):
            with Image.open(files[number]) as image:
                white = Image.new("RGBA", image.size, "white")
                flat = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
            yield "test" if place < 0.3 * len(files) else "train", name, flat


def surfaces(packages: Path, draw: np.random.Generator) -> Iterator[Picture]:
    """Yield windows of the pictures that scikit-image brings along."""
    found = importlib.util.find_spec("skimage")
    if found is None or found.origin is None:
        raise SystemExit("the surfaces are scikit-image's: pip install scikit-image")
    for name in SURFACES:
        with Image.open(Path(found.origin).parent / "data" / f"{name}.png") as image:
            whole = image.convert("RGB" if image.mode in ("RGB", "RGBA") else "L")
        side = 64 / min(whole.size)
        yield from _windows(name, whole, (side, side), draw, {"train": 10, "test": 30})


def _windows(
    name: str,
    whole: Image.Image,
    shares: tuple[float, float],
    draw: np.random.Generator,
    counts: dict[str, int],
) -> Iterator[Picture]:
    for part, count in counts.items():
        low, high = (0.0, LEFT) if part == "train" else (LEFT, 1.0)
        for _ in range(count):
            side = min(whole.size) * draw.uniform(*shares)
            left = draw.uniform(low * whole.width, max(high * whole.width - side, low * whole.width))
            top = draw.uniform(0, whole.height - side)
            yield part, name, whole.crop(tuple(round(edge) for edge in (left, top, left + side, top + side)))


KINDS = {"photographs": photographs, "stamps": stamps, "surfaces": surfaces}


def write(pictures: Iterator[Picture], into: Path) -> dict[str, int]:
    """Write `into/<train or test>/<class>/N.png`, and return how many of each part."""
    counts = {"train": 0, "test": 0}
    for part, name, image in pictures:
        folder = into / part / name
        folder.mkdir(parents=True, exist_ok=True)
        image.thumbnail((320, 320))
        image.save(folder / f"{counts[part]}.png")
        counts[part] += 1
    return counts


def probe(folder: Path) -> float:
    """Return the test accuracy of logistic regression on the frozen features."""
    data = open_data(folder, pixels="centered", image_size=None)
    model = create_model(MODEL, classes=len(data.classes), image_shape=data.image_shape)
    start_from(model, WEIGHTS)
    features = feature_function(model.eval(), data.image_shape)

    def seen(split: object) -> tuple[np.ndarray, np.ndarray]:
        parts = torch.arange(len(split.labels)).split(32)
        found = torch.cat([features(split.images(part)) for part in parts])
        return found.numpy(), split.labels.numpy()

    (train, labels), (test, truth) = seen(data.train), seen(data.test)
    center, scale = train.mean(0), train.std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = LogisticRegressionCV(Cs=np.logspace(-4, 2, 7), cv=5, max_iter=500)
        fitted.fit((train - center) / scale, labels)
    return float(fitted.score((test - center) / scale, truth))


def trained(folder: Path, out: Path, more: list[str], *, kill: bool) -> dict[str, object]:
    """Train by the verb, and return its figures; with `kill`, end a worker while the body thaws."""
    command = [
        sys.executable,
        "-m",
        "polyrhythm",
        "train",
        "--data",
        str(folder),
        "--out",
        str(out),
        "--json",
        *more,
    ]
    with out.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        killed = _kill_one(process, out) if kill else None
        said, _ = process.communicate(timeout=4 * LONGEST_S)
    if process.returncode:
        raise SystemExit(out.with_suffix(".log").read_text())
    return json.loads(said) | {"killed": killed}


def _kill_one(process: subprocess.Popen[str], out: Path) -> str | None:
    """Kill the newest of four workers some seconds into a round of thawing; return the round's name."""
    while process.poll() is None:
        for log in sorted((out / "stages").glob("*/events.jsonl")):
            if '"RunStarted"' in log.read_text():
                time.sleep(INTO_ROUND_S)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                if len(children) == 4:
                    os.kill(int(children[-1]), signal.SIGKILL)
                    return log.parent.name
        time.sleep(0.05)
    return None


def main() -> None:
    """Print a JSON line a set and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="where the two packages were unpacked")
    parser.add_argument("--only", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--killed", action="store_true", help="four workers, one of them killed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.only:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch, name)
            counts = write(KINDS[name](arguments.packages, np.random.default_rng(arguments.seed)), folder)
            reference = probe(folder)
            error = sqrt(reference * (1 - reference) / counts["test"])
            start = time.monotonic()
            more = ["--workers", "4"] if arguments.killed else []
            figures = trained(folder, Path(scratch, "run"), more, kill=arguments.killed)
            line = {
                "set": name,
                **counts,
                "probe": round(reference, 4),
                "standard_error": round(error, 4),
                "test_top1": round(float(str(figures["test_top1"])), 4),
                "kept": figures["fine_tuning"]["kept"],
                "seconds": round(time.monotonic() - start),
                "killed_in": figures["killed"],
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
