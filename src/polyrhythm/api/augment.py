"""A contact sheet of augmented pictures, for the verb `augment`.

original | changed | changed | …        a row per picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.tones import Tones
from polyrhythm.data.open import open_data
from polyrhythm.data.resized import scaled
from polyrhythm.data.seeding import generator_for, sample_keys
from polyrhythm.errors import RequestError
from polyrhythm.user_files import check_output

_MOST = 100
"""Largest number of pictures, and of variants of each, on one sheet."""


def augment(
    chain: str,
    preview: str | Path,
    *,
    data: Any = "fashion-mnist",
    pictures: int = 6,
    variants: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a contact sheet: training pictures, each beside its variants in `variants` epochs.

    Args:
        chain: augmentations, as `train` takes them, such as `crop(padding=2); flip`.
        preview: the picture file to write; its suffix is its format.
        data: a name, a folder or objects, as in `train`.
        pictures: number of pictures, drawn from the readable training data.
        variants: of each.
        seed: chooses the pictures and their changes.

    Returns:
        `file`, `augment`, `pictures` and `variants`.

    Raises:
        RequestError: the request is invalid; nothing has been written.
    """
    path = Path(preview)
    check_output(path)
    if path.suffix.lower() not in Image.registered_extensions():
        raise RequestError(f"{path} has no ending of a picture format: name it {path.stem or 'preview'}.png")
    for what, number in (("pictures", pictures), ("variants", variants)):
        if not 1 <= number <= _MOST:
            raise RequestError(f"{what} must be from 1 to {_MOST}, as one sheet can show (given {number})")
    made = build_chain(chain)
    if made is None:
        raise RequestError("nothing to preview: name an augmentation, such as rotation; flip")
    dataset = open_data(data, skip_unreadable=True)
    if dataset.image_shape[0] not in (1, 3):
        raise RequestError(f"pictures of {dataset.image_shape[0]} channels cannot be shown: 1 or 3 can")
    tones = Tones(dataset.black, dataset.white)
    generator = generator_for("contact sheet", seed)
    indices = torch.randperm(len(dataset.train), generator=generator)[:pictures].sort().values
    images = dataset.train.images(indices)
    changed = [
        made.on(tones)(images, sample_keys("transform", seed, epoch, indices)) for epoch in range(variants)
    ]
    shown = scaled(images, changed[0].shape[-1])  # a window leaves less of them
    sheet = contact_sheet(torch.stack([shown, *changed], 1), tones)
    Image.fromarray(sheet.numpy()).save(path)
    return {"file": str(path), "augment": str(made), "pictures": len(indices), "variants": variants}


TILE = 96
"""Smaller pictures are enlarged, by an integer factor, to at least this many pixels a side."""

_GAP = 4
_PAPER = 255


def contact_sheet(pictures: Tensor, tones: Tones) -> Tensor:
    """Arrange pictures on a sheet.

    Args:
        pictures: (rows, columns, C, H, W) float, C being 1 or 3.
        tones: values of black and white in them.

    Returns:
        (H', W', 3) uint8.
    """
    rows, columns = pictures.shape[:2]
    tiles = _bytes(pictures.flatten(0, 1), tones)
    factor = -(-TILE // min(tiles.shape[-2:]))
    if factor > 1:
        tiles = interpolate(tiles, scale_factor=factor, mode="nearest")
    tiles = pad(tiles, (_GAP,) * 4, value=_PAPER)
    channels, height, width = tiles.shape[1:]
    sheet = tiles.view(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4)
    return (
        sheet.reshape(channels, rows * height, columns * width)
        .expand(3, -1, -1)
        .permute(1, 2, 0)
        .contiguous()
    )


def _bytes(pictures: Tensor, tones: Tones) -> Tensor:
    black, white = tones.of(pictures)
    return ((pictures - black) * (255 / (white - black))).round_().clamp_(0, 255).to(torch.uint8)
