"""Augmentations of today: those of torchvision, each picture's own, whatever its batch."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import Tensor

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.policies import unit_of
from polyrhythm.augmentation.tones import BYTES, Tones
from polyrhythm.augmentation.transforms import rand_augment, trivial_augment
from polyrhythm.augmentation.transforms.color_jitter import jitter
from polyrhythm.augmentation.transforms.random_resized_crop import RandomResizedCrop
from polyrhythm.augmentation.warp import warp
from polyrhythm.data.seeding import sample_keys
from polyrhythm.errors import RequestError
from polyrhythm.models.create import define_missing_operators

define_missing_operators()
from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

IMAGENET = Tones((-2.1, -2.0, -1.8), (2.2, 2.4, 2.6))
SPECS = [
    "random_resized_crop",
    "color_jitter",
    "erasing(probability=0.9)",
    "erasing(fill=noise)",
    "pca_color",
    "trivial_augment",
    "rand_augment",
    "augmix",
]


def pictures(count: int = 12, side: int = 24) -> Tensor:
    small = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(small, (side, side), mode="bilinear")
    return (smooth * 255).to(torch.uint8)


@pytest.mark.parametrize("spec", SPECS)
def test_a_picture_changes_alike_in_any_batch_and_form(spec: str) -> None:
    chain = build_chain(spec)
    assert chain is not None
    images, keys = pictures(), sample_keys("transform", 1, 2, torch.arange(12))
    changed = chain(images, keys)
    assert changed.shape == images.shape
    assert changed.dtype == torch.uint8
    assert (changed != images).flatten(1).any(1).sum() >= 4
    torch.testing.assert_close(chain(images[5:7], keys[5:7]), changed[5:7])
    assert not torch.equal(chain(images, sample_keys("transform", 1, 3, torch.arange(12))), changed)
    if spec not in (
        "erasing(probability=0.9)",
    ):  # whose zero is black in bytes, the mean in normalized pixels
        black, white = IMAGENET.of(torch.zeros(1))
        normal = images / 255 * (white - black) + black
        found = (chain.on(IMAGENET)(normal, keys) - black) / (white - black) * 255
        torch.testing.assert_close(found, changed.float(), atol=1.01, rtol=0)


def test_no_strength_changes_nothing() -> None:
    images, keys = pictures(), torch.arange(12)
    for spec in (
        "random_resized_crop(smallest=1, ratio=1)",
        "color_jitter(probability=0)",
        "pca_color(strength=0)",
    ):
        chain = build_chain(spec)
        assert chain is not None
        assert torch.equal(chain(images, keys), images)


@pytest.mark.parametrize(
    ("place", "act"),
    [
        (0, functional.adjust_brightness),
        (1, functional.adjust_contrast),
        (2, functional.adjust_saturation),
        (3, functional.adjust_hue),
    ],
)
def test_colors_change_as_torchvisions_do(place: int, act: object) -> None:
    images = pictures().float() / 255
    for value in (-0.3, 0.2, 0.45) if place == 3 else (0.4, 1.3):
        changes = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(12, 1)
        changes[:, place] = value
        found = jitter(images, changes, Tones((0.0,), (1.0,)))
        torch.testing.assert_close(found, act(images, value), atol=2e-5, rtol=0)  # type: ignore[operator]


def test_a_crop_is_torchvisions_resized_one() -> None:
    image = pictures(1, 48)[0].float()
    # a part of 24 by 12 pixels whose corner is (6, 20)
    parameters = torch.tensor([[1 - 12 / 48, 1 - 24 / 48, (20 + 6 - 24) / 18, (6 + 12 - 24) / 12]])
    found = warp(image[None], [(RandomResizedCrop(), parameters)], "border")[0]
    expected = functional.resized_crop(image, 6, 20, 24, 12, [48, 48], antialias=False)
    # the outermost half pixel of the part: torchvision repeats it, and here what lies beside the part is seen
    torch.testing.assert_close(found[:, 2:-2, 3:-3], expected[:, 2:-2, 3:-3], atol=1e-2, rtol=0)


def test_parts_have_at_least_the_smallest_area() -> None:
    from polyrhythm.augmentation.draws import Draws

    drawn = RandomResizedCrop(smallest=0.3).draw(Draws(torch.arange(2000)))
    width, height = 1 - drawn[:, 0], 1 - drawn[:, 1]
    assert float((width * height).min()) > 0.25  # what is longer than the picture is cut off
    assert 0.3 < float((width * height).mean()) < 0.7
    assert float((width / height).max()) <= 4 / 3 + 1e-6
    assert float(drawn[:, 2:].abs().max()) <= 1


def test_erased_rectangles_have_the_share_and_the_color_of_the_mean() -> None:
    images = torch.full((200, 3, 32, 32), 7.0)
    chain = build_chain("erasing(probability=1, smallest=0.1, largest=0.2)")
    assert chain is not None
    erased = chain(images, torch.arange(200)) == 0
    shares = erased[:, 0].float().mean((1, 2))
    assert float(shares.min()) > 0.05
    assert float(shares.max()) < 0.24
    rows, columns = erased[:, 0].any(2).sum(1), erased[:, 0].any(1).sum(1)
    assert torch.equal(rows * columns, erased[:, 0].sum((1, 2)))


@pytest.mark.parametrize("level", [0.0, 0.37, 1.0])
@pytest.mark.parametrize(
    ("space", "number", "name", "strength"),
    [
        (trivial_augment.SPACE, 3, "TranslateX", lambda level: float(round(32 * level))),
        (trivial_augment.SPACE, 5, "Rotate", lambda level: 135 * level),
        (trivial_augment.SPACE, 6, "Brightness", lambda level: 0.99 * level),
        (trivial_augment.SPACE, 7, "Color", lambda level: 0.99 * level),
        (trivial_augment.SPACE, 8, "Contrast", lambda level: 0.99 * level),
        (trivial_augment.SPACE, 9, "Sharpness", lambda level: 0.99 * level),
        (rand_augment.SPACE, 10, "Posterize", lambda level: 8 - round(4 * level)),
        (rand_augment.SPACE, 12, "AutoContrast", lambda level: 0.0),
        (rand_augment.SPACE, 13, "Equalize", lambda level: 0.0),
    ],
)
def test_operations_are_torchvisions(
    space: list, number: int, name: str, strength: object, level: float
) -> None:
    image = Image.fromarray(pictures(1, 40)[0].permute(1, 2, 0).numpy())
    theirs = v2.TrivialAugmentWide()._apply_image_or_video_transform(
        image,
        name,
        strength(level),
        v2.InterpolationMode.NEAREST,
        {Image.Image: 0},  # type: ignore[operator]
    )
    found, expected = unit_of(space[number].act(image, level)), unit_of(theirs)
    assert float((found - expected).abs().mean()) < 2e-3


def test_pictures_of_two_channels_are_refused() -> None:
    for spec in ("trivial_augment", "pca_color"):
        chain = build_chain(spec)
        assert chain is not None
        with pytest.raises(RequestError, match="2"):
            chain.on(BYTES)(pictures()[:, :2], torch.arange(12))
