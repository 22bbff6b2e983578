"""What pretrained weights bring on a few hundred photographs: EfficientNet-Lite0 fine-tuned, and from random weights.

A class is a photograph. Training pictures are windows of its left part, test pictures windows of its right part, which
no training picture touches: so the network must know the scene again, not the pixels.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

import polyrhythm
from polyrhythm.api.train import prepare_process

MODEL = "timm.tf_efficientnet_lite0"
LEFT = 0.55  # of the width is for training
SHARES = (0.25, 0.45)  # a window's side, of the photograph's shorter one


def photographs(folder: Path) -> dict[str, Image.Image]:
    """Opens every JPEG of a folder, and the two photographs that scikit-learn brings along."""
    found = {path.stem: Image.open(path).convert("RGB") for path in sorted(folder.glob("*.jpg"))}
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        found[name] = Image.fromarray(pixels)
    for image in found.values():
        image.thumbnail((1600, 1600))
    return found


def cut(images: dict[str, Image.Image], into: Path, counts: dict[str, int], seed: int) -> None:
    """Writes `into/<train or test>/<photograph>/N.jpg`."""
    generator = np.random.default_rng(seed)
    for (part, count), (name, image) in product(counts.items(), images.items()):
        low, high = (0.0, LEFT) if part == "train" else (LEFT, 1.0)
        folder = into / part / name
        folder.mkdir(parents=True)
        for number in range(count):
            side = min(image.size) * generator.uniform(*SHARES)
            left = generator.uniform(low * image.width, high * image.width - side)
            top = generator.uniform(0, image.height - side)
            window = tuple(round(edge) for edge in (left, top, left + side, top + side))
            image.crop(window).resize((256, 256)).save(folder / f"{number}.jpg", quality=90)


def train(data: Path, out: Path, arguments: argparse.Namespace, **options: object) -> dict[str, object]:
    """Trains, and gives the figures."""
    run = polyrhythm.train(
        data=str(data),
        model=MODEL,
        workers=2,
        batch_size=8,
        epochs=arguments.epochs,
        image_size=arguments.image_size,
        optimizer="adam(lr=0.002)",
        schedule="cosine(warmup_epochs=0.3)",
        pixels="centered",
        augment="flip",
        keep_checkpoints=0,
        seed=arguments.seed,
        out=out,
        start_method="fork",
        **options,
    )
    assert run is not None
    return run.figures


def main() -> None:
    """Measures both, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photographs", type=Path, required=True, help="a folder of JPEG photographs")
    parser.add_argument("--weights", default="efficientnet_lite0", help="as polyrhythm train takes them")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--only", choices=["fine-tuned", "random"], help="one of the two")
    parser.add_argument("--image-size", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare_process()
    images = photographs(arguments.photographs)
    with TemporaryDirectory() as scratch:
        data = Path(scratch, "data")
        cut(images, data, {"train": 20, "test": 10}, arguments.seed)
        ways: dict[str, dict[str, object]] = {
            "fine-tuned": {
                "weights": arguments.weights,
                "freeze": "body",
                "freeze_epochs": 4,
                "rate_decay": 0.7,
            },
            "random": {},
        }
        figures = {
            name: train(data, Path(scratch, name), arguments, **options)
            for name, options in ways.items()
            if arguments.only in (None, name)
        }
    report = {
        name: {key: each[key] for key in ("test_top1", "test_loss", "seconds", "epochs")}
        for name, each in figures.items()
    }
    print(json.dumps({"classes": len(images), **report}, indent=2))


if __name__ == "__main__":
    main()
