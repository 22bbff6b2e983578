"""Why does dense testing cost accuracy from pretrained weights? Scores of a map against those of windows cut out.

    python benchmarks/deep-image/dense.py --folder runs/dense [--seeds 0 1 2 3 4] [--out benchmarks/deep-image]

Each image of 144 pixels shows one article of Fashion-MNIST, 36 to 120 pixels high, at a random place on a colored
gradient with noise; 200 for training, 100 for tests. The head of `efficientnet_lite0` learns from random pieces of 64
pixels in images of 72 or of 144. *Windows* are at the places of the dense map (every 32 pixels), but cut out, so that
each is padded with zeros at its own border as in training; in the map only the border of the whole image is.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import polyrhythm
from photographs import STARTS, summary
from polyrhythm.api.train import prepare_process
from polyrhythm.data.sources.fashion_mnist import FashionMNIST
from polyrhythm.evaluation import views as viewing
from polyrhythm.evaluation.dense import SlidingWindows

SIDE, HEIGHTS, STRIDE = 144, (36, 120), 32
COUNTS = {"train": 200, "test": 100}
PIECE, SCALES = STARTS["pretrained"].side, STARTS["pretrained"].scales
VIEWS: dict[str, dict[str, Any]] = {
    "center": {},
    "ten crops": {"ten_crop": True},
    "windows": {"dense": True},
    "dense": {"dense": True},
}


def scene(article: NDArray[np.uint8], draw: np.random.Generator) -> Image.Image:
    """Return an image with one article."""
    corners = draw.uniform(20, 110, (2, 2, 3)).astype(np.uint8)
    ground = np.asarray(Image.fromarray(corners).resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32)
    height = round(float(np.exp(draw.uniform(*np.log(HEIGHTS)))))
    shown = Image.fromarray(article).resize((height, height), Image.Resampling.BICUBIC)
    grays = np.asarray(shown.rotate(draw.uniform(-15, 15)), np.float32)[..., None] / 255
    top, left = draw.integers(0, SIDE - height + 1, 2)
    cover = np.zeros((SIDE, SIDE, 1), np.float32)
    cover[top : top + height, left : left + height] = grays
    made = ground * (1 - np.minimum(1, 3 * cover)) + draw.uniform(140, 255, 3) * cover
    return Image.fromarray((made + draw.normal(0, 8, made.shape)).clip(0, 255).astype(np.uint8))


def write_images(folder: Path, seed: int) -> None:
    """Write `folder/<train or test>/<class>/N.png`, once."""
    if (folder / "done").exists():
        return
    data, draw = FashionMNIST().load(), np.random.default_rng(seed)
    for part, split in (("train", data.train), ("test", data.test)):
        for place, number in enumerate(draw.permutation(len(split))[: COUNTS[part]].tolist()):
            image = split.images(torch.tensor([number]))[0, 0]
            pixels = ((image - image.min()) / (image.max() - image.min()) * 255).byte().numpy()
            into = folder / part / str(int(split.labels[number]))
            into.mkdir(parents=True, exist_ok=True)
            scene(pixels, draw).save(into / f"{place:03}.png")
    (folder / "done").touch()


def errors(folder: Path, seed: int) -> dict[str, float]:
    """Train the heads of both scales; return the test errors in percent."""
    images, found = folder / "images", {}
    write_images(images, seed)
    files = sorted((images / "test").glob("*/*.png"))
    for scale in SCALES:
        run = folder / str(scale)
        if not (run / "model.safetensors").exists():
            shutil.rmtree(run, ignore_errors=True)  # left by a killed run
            polyrhythm.train(
                data=str(images),
                out=run,
                image_size=PIECE,
                scale=scale,
                seed=seed,
                workers=1,
                threads=1,
                keep_checkpoints=0,
                start_method="fork",
                **(STARTS["pretrained"].options | {"views": 2}),
            )
        for view, options in VIEWS.items():
            if view == "ten crops" and scale != SCALES[0]:
                continue  # corners of the larger images rarely show the article
            found[f"{scale}, {view}"] = error(files, run, scale, view, options)
            print(seed, scale, view, found[f"{scale}, {view}"], flush=True)
    return found


def error(files: list[Path], run: Path, scale: int, view: str, options: dict[str, Any]) -> float:
    """Return the test error of a view in percent."""
    usual = viewing.to_dense
    if view == "windows":
        viewing.to_dense = lambda model, shape: SlidingWindows(model, shape[1:], STRIDE)  # type: ignore[assignment, return-value]
    try:
        seen = polyrhythm.predict(files, run, top=1, device="cpu", scales=(scale,), **options)["images"]
    finally:
        viewing.to_dense = usual
    wrong = [each["classes"][0]["class"] != file.parent.name for file, each in zip(files, seen, strict=True)]
    return 100 * sum(wrong) / len(wrong)


def main() -> None:
    """Write the numbers of all seeds as they are known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/deep-image"))
    chosen = parser.parse_args()
    prepare_process()
    found: list[dict[str, float]] = []
    for seed in chosen.seeds:
        found.append(errors(chosen.folder / str(seed), seed))
        facts = {key: summary([each[key] for each in found]) for key in found[0]}
        for scale in SCALES:
            for view in ("windows", "dense"):
                change = [each[f"{scale}, {view}"] - each[f"{scale}, center"] for each in found]
                facts[f"{scale}, {view}, change"] = summary(change)
        (chosen.out / "dense.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
