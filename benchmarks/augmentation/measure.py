"""How fast pictures are changed: our batches against torchvision's transforms, picture by picture, on one core.

Both do the same to 64 pictures of 224 pixels: colour cast, rotation, stretching and flip. Seconds are those of the
processor, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.data.seeding import sample_keys
from polyrhythm.models.create import define_missing_operators

CHAIN = "colour_casting; rotation(strength=15); stretching(strength=0.2); flip"


def theirs() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torchvision's chain for one picture (C, H, W), uint8: bilinear, as ours is."""
    define_missing_operators()
    from torchvision.transforms import v2

    roles = v2.Lambda(
        lambda image: (
            (
                image.to(torch.int16)
                + torch.randint(-20, 21, (3, 1, 1), dtype=torch.int16) * (torch.rand(3, 1, 1) < 0.5)
            )
            .clamp(0, 255)
            .to(torch.uint8)
        )
    )
    bilinear = v2.InterpolationMode.BILINEAR
    return v2.Compose(
        [
            roles,
            v2.RandomRotation(15, interpolation=bilinear),
            v2.RandomAffine(0, scale=(1 / 1.2, 1.2), interpolation=bilinear),
            v2.RandomHorizontalFlip(),
        ]
    )


def main() -> None:
    """Measures both in turn, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = (arguments.batch, 3, arguments.side, arguments.side)
    images = torch.randint(256, shape, dtype=torch.uint8)
    ours, one = build_chain(CHAIN), theirs()
    assert ours is not None
    times: dict[str, list[float]] = {"ours": [], "torchvision": []}
    for number in range(arguments.rounds + 1):
        keys = sample_keys("benchmark", 0, number, torch.arange(arguments.batch))
        started_s = time.process_time()
        ours(images, keys)
        between_s = time.process_time()
        torch.stack([one(image) for image in images])
        ended_s = time.process_time()
        if number:  # the first round warms up
            times["ours"].append(between_s - started_s)
            times["torchvision"].append(ended_s - between_s)
    ratios = [b / a for a, b in zip(times["ours"], times["torchvision"], strict=True)]
    print(
        json.dumps(
            {
                "threads": arguments.threads,
                "pictures": arguments.batch,
                "ours_ms": round(1000 * median(times["ours"]), 1),
                "torchvision_ms": round(1000 * median(times["torchvision"]), 1),
                "ratio": round(median(ratios), 2),
                "lowest": round(min(ratios), 2),
                "highest": round(max(ratios), 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
