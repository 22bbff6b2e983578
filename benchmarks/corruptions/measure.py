"""Corruptions beside those of the package `imagecorruptions`: how far they move photographs, what detail is left.

    distance   root of the mean squared difference from the original, values in [0, 1]
    detail     mean absolute difference of neighboring pixels, as a share of the original's

Both are means over windows of 224 pixels from scikit-learn's two photographs.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from polyrhythm.augmentation.tones import UNIT
from polyrhythm.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt

SIDE = 224


def photographs() -> Tensor:
    """Return windows (8, 3, 224, 224) of values in [0, 1]."""
    whole = [torch.from_numpy(each.copy()).permute(2, 0, 1) / 255 for each in load_sample_images().images]
    corners = [(0, 0), (0, 400), (180, 100), (190, 300)]
    return torch.stack([each[:, y : y + SIDE, x : x + SIDE] for each in whole for y, x in corners])


def peers() -> object:
    """Return the package's functions, with the names that numpy and scikit-image have changed since."""
    warnings.simplefilter("ignore")
    np.float_ = np.float64
    found = importlib.import_module("imagecorruptions.corruptions")
    renamed = found.gaussian

    def gaussian(
        image: np.ndarray, *sigma: object, multichannel: bool = False, **options: object
    ) -> np.ndarray:
        return renamed(image, *sigma, channel_axis=-1 if multichannel else None, **options)

    found.gaussian = gaussian
    return found


def theirs(functions: object, name: str, images: Tensor, severity: int) -> Tensor:
    """Return what the package makes of pictures."""
    made = []
    for number, image in enumerate(images):
        np.random.seed(number)
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        made.append(torch.from_numpy(np.asarray(getattr(functions, name)(picture, severity)).copy()))
    return (torch.stack(made).float() / 255).clamp(0, 1).permute(0, 3, 1, 2)


def figures(original: Tensor, changed: Tensor) -> tuple[float, float]:
    """Return distance and detail."""
    distance = (changed - original).square().mean((1, 2, 3)).sqrt().mean()
    return float(distance), _detail(changed) / _detail(original)


def _detail(images: Tensor) -> float:
    return float(images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean())


def main() -> None:
    """Print the table, and write a contact sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=sorted(CORRUPTIONS))
    parser.add_argument("--sheet", type=Path, help="a picture of ours and theirs at severities 1, 3 and 5")
    arguments = parser.parse_args()
    functions, images = peers(), photographs()
    rows = []
    print("| corruption | distance here, severity 1 to 5 | in the package | detail here | in the package |")
    print("|---|---|---|---|---|")
    for name in arguments.kinds:
        both = [
            (
                corrupt(name, images, severity, torch.arange(len(images)), UNIT),
                theirs(functions, name, images, severity),
            )
            for severity in range(1, SEVERITIES + 1)
        ]
        own, other = ([figures(images, pair[which]) for pair in both] for which in (0, 1))
        cells = [
            ", ".join(f"{each[which]:.2f}" for each in side) for which in (0, 1) for side in (own, other)
        ]
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)
        rows.append(torch.cat([pair[which][3] for which in (0, 1) for pair in both[::2]], dim=2))
    if arguments.sheet:
        sheet = (torch.cat(rows, dim=1) * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(sheet).save(arguments.sheet)


if __name__ == "__main__":
    main()
