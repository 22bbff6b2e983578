"""How fast pictures are changed: our batches against torchvision's and Kornia's transforms, on one core.

All do the same to 64 pictures of 224 pixels: color cast, rotation, stretching and flip. Seconds are those of the
processor, so that other work on the machine counts less. torchvision changes picture by picture, or the whole batch
with one draw, which changes all pictures alike; Kornia draws for each picture of a batch.
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

PEERS = ("torchvision", "torchvision-batch", "kornia")
CHAIN = "color_casting; rotation(strength=15); stretching(strength=0.2); flip"


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


def kornias() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return Kornia's chain for a batch (B, C, H, W), float from 0 to 1; each picture has draws of its own."""
    from kornia import augmentation as K

    return torch.nn.Sequential(
        K.RandomBrightness((0.92, 1.08), p=0.875),  # it has no cast; this costs less
        K.RandomRotation(15.0, p=1.0, resample="bilinear"),
        K.RandomAffine(0.0, scale=(1 / 1.2, 1.2, 1 / 1.2, 1.2), p=1.0, resample="bilinear"),
        K.RandomHorizontalFlip(p=0.5),
    )


def peer_of(name: str) -> Callable[[torch.Tensor], object]:
    """Return what a peer does with a batch of bytes (B, C, H, W), bytes again where it can."""
    if name == "kornia":
        chain = kornias()
        return lambda images: (chain(images / 255) * 255).round().to(torch.uint8)
    one = theirs()
    if name == "torchvision-batch":
        return one
    return lambda images: torch.stack([one(image) for image in images])


def main() -> None:
    """Measures ours and the peers in turn, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--peer", choices=PEERS, nargs="+", default=list(PEERS), help="all in one run, in turn"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = (arguments.batch, 3, arguments.side, arguments.side)
    images = torch.randint(256, shape, dtype=torch.uint8)
    ours, peers = build_chain(CHAIN), {name: peer_of(name) for name in arguments.peer}
    assert ours is not None
    times: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    for number in range(arguments.rounds + 1):
        keys = sample_keys("benchmark", 0, number, torch.arange(arguments.batch))
        acts = {"ours": lambda keys=keys: ours(images, keys)}
        acts |= {name: lambda peer=peer: peer(images) for name, peer in peers.items()}
        for name, act in acts.items():
            began_s = time.process_time()
            act()
            if number:  # the first round warms up
                times[name].append(time.process_time() - began_s)
    found = {"threads": arguments.threads, "pictures": arguments.batch, "ours_ms": _ms(times["ours"])}
    for name in peers:
        ratios = [theirs / own for own, theirs in zip(times["ours"], times[name], strict=True)]
        found[name] = {
            "ms": _ms(times[name]),
            "ratio": round(median(ratios), 2),
            "lowest": round(min(ratios), 2),
            "highest": round(max(ratios), 2),
        }
    print(json.dumps(found, indent=2))


def _ms(seconds: list[float]) -> float:
    return round(1000 * median(seconds), 1)


if __name__ == "__main__":
    main()
