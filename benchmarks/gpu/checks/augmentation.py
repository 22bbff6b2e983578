"""Part 5: pictures are changed on the device as fast as by torchvision and Kornia."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from checks.setting import CLASSES, Figures, NotInstalled, Part, Problems, Row, Setting
from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.mixing import Mixer
from polyrhythm.data.seeding import sample_keys
from polyrhythm.models.create import define_missing_operators

CHAINS = {
    "Deep Image": "color_casting; rotation(strength=15); stretching(strength=0.2); flip",
    "vignetting and lens distortion": "vignetting; lens_distortion",
    "crop and flip": "random_resized_crop; flip",
    "color_jitter": "color_jitter",
    "rand_augment": "rand_augment",
    "trivial_augment": "trivial_augment",
    "augmix": "augmix",
    "erasing": "erasing",
    "mixup": "mixup",
    "cutmix": "cutmix",
}


def _batch(setting: Setting) -> Tensor:
    side, count = (32, 8) if setting.quick else (224, 256)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator).to(
        setting.device
    )


def _keys(number: int, count: int) -> Tensor:
    return sample_keys("benchmark", 0, number, torch.arange(count))


def ours(name: str, images: Tensor) -> Callable[[int], Tensor]:
    """Return what changes a batch by a chain; its argument is the number of the batch."""
    chain = build_chain(CHAINS[name])
    assert chain is not None
    if not chain.mixings:
        return lambda number: chain(images, _keys(number, len(images)))
    mixer, floats = Mixer(chain.mixings, CLASSES), images / 255
    others, labels = floats.flip(0), torch.arange(len(images)) % CLASSES
    return lambda number: mixer(floats, others, labels, labels.flip(0), _keys(number, len(images)))[0]


def by_torchvision(name: str, images: Tensor) -> Callable[[int], object]:
    """Return what changes a batch by torchvision, with draws of its own for each picture, as ours has.

    Mixtures have one draw for the batch, as torchvision knows no other.
    """
    define_missing_operators()
    from torchvision.transforms import v2

    side, bilinear = images.shape[-1], v2.InterpolationMode.BILINEAR

    def cast(image: Tensor) -> Tensor:
        shift = torch.randint(-20, 21, (3, 1, 1), device=image.device) * (
            torch.rand(3, 1, 1, device=image.device) < 0.5
        )
        return (image.to(torch.int16) + shift).clamp(0, 255).to(torch.uint8)

    kinds: dict[str, Callable[[], Any]] = {
        "Deep Image": lambda: v2.Compose(
            [
                v2.Lambda(cast),
                v2.RandomRotation(15, interpolation=bilinear),
                v2.RandomAffine(0, scale=(1 / 1.2, 1.2), interpolation=bilinear),
                v2.RandomHorizontalFlip(),
            ]
        ),
        "crop and flip": lambda: v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip()]),
        "color_jitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "rand_augment": v2.RandAugment,
        "trivial_augment": v2.TrivialAugmentWide,
        "augmix": v2.AugMix,
        "erasing": lambda: v2.RandomErasing(0.5),
    }
    if name in ("mixup", "cutmix"):
        mix = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[name](num_classes=CLASSES)
        floats, labels = images / 255, torch.arange(len(images), device=images.device) % CLASSES
        return lambda number: mix(floats, labels)
    if name not in kinds:
        raise NotInstalled(f"torchvision has no {name}")
    change = kinds[name]()
    return lambda number: torch.stack([change(image) for image in images])


def by_kornia(name: str, images: Tensor) -> Callable[[int], object]:
    """Return what changes a batch by Kornia, with draws of its own for each picture."""
    if find_spec("kornia") is None:
        raise NotInstalled("kornia")
    from kornia import augmentation as K

    side = images.shape[-1]
    kinds: dict[str, Callable[[], Any]] = {
        "Deep Image": lambda: torch.nn.Sequential(
            K.RandomBrightness((0.92, 1.08), p=0.875),  # it has no cast; this costs less
            K.RandomRotation(15.0, p=1.0, resample="bilinear"),
            K.RandomAffine(0.0, scale=(1 / 1.2, 1.2, 1 / 1.2, 1.2), p=1.0, resample="bilinear"),
            K.RandomHorizontalFlip(p=0.5),
        ),
        "crop and flip": lambda: torch.nn.Sequential(
            K.RandomResizedCrop((side, side)), K.RandomHorizontalFlip(p=0.5)
        ),
        "color_jitter": lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0),
        "erasing": lambda: K.RandomErasing(p=0.5),
    }
    if name not in kinds:
        raise NotInstalled(f"Kornia is not compared by {name}")
    change = kinds[name]()
    return lambda number: (change(images / 255) * 255).round().to(torch.uint8)


PEERS = {"torchvision": by_torchvision, "kornia": by_kornia}


def changed(setting: Setting, name: str) -> Figures:
    """Pictures on the device stay there, change as the CPU changes them, and come as fast as from each peer."""
    images, problems, found = _batch(setting), Problems(), Figures()
    act = ours(name, images)
    here = act(0)
    problems.expect(here.device.type == setting.device.type, f"pictures come back on {here.device}")
    few = images[:8].cpu()
    there, own = ours(name, few)(0), ours(name, images[:8])(0).cpu()
    unit = 255 if own.dtype is torch.uint8 else 1
    apart = float((own.float() - there.float()).abs().mean()) / unit
    found["differs_from_cpu"] = apart
    problems.expect(apart < 0.01, f"pictures differ from a CPU's by {apart:.3f} of their range in the mean")

    def rate(act: Callable[[int], object]) -> float:
        numbers = iter(range(1, 1000))
        return len(images) / setting.seconds(lambda: act(next(numbers)), 2 if setting.quick else 3)

    found["images_per_s"] = rate(act)
    for peer, make in PEERS.items():
        try:
            found[peer] = rate(make(name, images))
        except NotInstalled as error:
            found[peer] = f"not installed: {error}" if str(error) == peer else str(error)
            continue
        except Exception as error:  # a peer that fails is no fault of ours, and says so
            found[peer] = f"{type(error).__name__}: {error}"[:200]
            continue
        share = found["images_per_s"] / found[peer]
        problems.expect(setting.quick or share >= 1.0, f"{share:.2f} of {peer}'s images/s")
    return problems.conclude(found)


def kornia(setting: Setting) -> Figures:
    """Kornia is installed, so that the rows above compare with it."""
    if find_spec("kornia") is None:
        raise NotInstalled("kornia")
    return {"version": __import__("kornia").__version__}


PART = Part(
    5,
    "Augmentation on the device",
    (
        *(Row(f"augmentation: {name}", partial(changed, name=name), 5) for name in CHAINS),
        Row("Kornia", kornia, 1),
    ),
)
