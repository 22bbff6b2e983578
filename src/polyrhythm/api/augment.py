"""A contact sheet of changed images, for the verb `augment`.

original | changed | changed | …        a row per image: what augmentation makes of it, epoch by epoch
cat      | rotation -8.1 | …            its label, and what was drawn

original | severity 1 | … | 5           a row per image and corruption
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import interpolate

from polyrhythm.augmentation.chain import Chain, build_chain
from polyrhythm.augmentation.draws import RecordedDraws
from polyrhythm.augmentation.mixing import Mixer
from polyrhythm.augmentation.tones import Tones
from polyrhythm.config.assemble import chain_from, opened
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.data.dataset import Dataset
from polyrhythm.data.resized import Uncut, scaled
from polyrhythm.data.seeding import generator_for, sample_keys
from polyrhythm.errors import RequestError, unknown
from polyrhythm.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from polyrhythm.user_files import check_output

_MOST = 100
"""Largest number of images, and of variants of each, on one sheet."""
_RECIPES = (".yaml", ".yml")
_OF_DATA = ("data", "image_size", "scale", "pixels", "model", "weights")


def combinations(chain: str, side: int) -> list[tuple[str, int | None]]:
    """Return the number of visibly different results of each augmentation of a colored square image.

    Continuous changes are counted in steps of one pixel at the corners, or one shade of a byte.

    Args:
        chain: augmentations or a recipe, as for `augment`.
        side: pixels a side of the image.

    Raises:
        RequestError: the request is invalid.
    """
    if chain.lower().endswith(_RECIPES):
        chain = str(read_recipe(Path(chain)).get("augment", "none"))
    made = build_chain(chain)
    return [] if made is None else made.combinations(3, side)


def augment(
    chain: str | None,
    preview: str | Path,
    *,
    data: Any = None,
    images: int = 6,
    variants: int = 8,
    seed: int | None = None,
    corruptions: Sequence[str] | None = None,
    pictures: int | None = None,
) -> dict[str, Any]:
    """Write a contact sheet: training images, each next to its variants in `variants` epochs.

    Args:
        chain: augmentations, as `train` takes them, such as `crop(padding=2); flip`; or a recipe, or a run's
            `config.yaml`, with data, image sizes, augmentations and seed; None with `corruptions`.
        preview: the image file to write; its suffix is its format.
        data: a name, a folder or objects, as in `train`; None: the recipe's, else `fashion-mnist`.
        images: number of images, drawn from the readable training data.
        variants: variants of each.
        seed: seed of the choice of images and of their changes; None: the recipe's, else 0.
        corruptions: names of corruptions to show at every severity instead; empty: all of them.
        pictures: former name of `images`, until 0.2.0.

    Returns:
        `file`, `augment`, `images` (also as `pictures`), `variants`, `corruptions`, and `captions`: texts by row, the
        label first.

    Raises:
        RequestError: the request is invalid; nothing has been written.
    """
    images = images if pictures is None else pictures
    path = Path(preview)
    check_output(path)
    if path.suffix.lower() not in Image.registered_extensions():
        raise RequestError(f"{path} has no suffix of an image format: name it {path.stem or 'preview'}.png")
    for what, number in (("images", images), ("variants", variants)):
        if not 1 <= number <= _MOST:
            raise RequestError(f"{what} must be from 1 to {_MOST}, as one sheet can show (given {number})")
    for name in corruptions or ():
        if name not in CORRUPTIONS:
            raise unknown("corruption", name, list(CORRUPTIONS))
    recipe = {}
    if chain is not None and chain.lower().endswith(_RECIPES):
        recipe = read_recipe(Path(chain))
        chain = str(recipe.get("augment", "none"))
    own = {"skip_unreadable": True} | ({} if data is None else {"data": data})
    config = configure({name: recipe[name] for name in (*_OF_DATA, "seed") if name in recipe}, own)
    seed = config.seed if seed is None else seed
    made = build_chain(chain or "none")
    if made is None and corruptions is None and config.scale is None:
        raise RequestError("nothing to preview: name an augmentation, such as rotation; flip")
    dataset = opened(config)
    if dataset.image_shape[0] not in (1, 3):
        raise RequestError(f"images of {dataset.image_shape[0]} channels cannot be shown: 1 or 3 can")
    indices = torch.randperm(len(dataset.train), generator=generator_for("contact sheet", seed))
    indices = indices[:images].sort().values
    if corruptions is not None:
        names = list(corruptions) or list(CORRUPTIONS)
        shown, captions = _corrupted(dataset, indices, names)
        made, variants = None, SEVERITIES
    else:
        names, made = [], chain_from(config, made, dataset)
        assert made is not None
        shown, captions = _augmented(dataset, made, indices, variants, seed)
    sheet = contact_sheet(shown, Tones(dataset.black, dataset.white), captions)
    Image.fromarray(sheet.numpy()).save(path)
    return {
        "file": str(path),
        "augment": "none" if made is None else str(made),
        "images": len(indices),
        "pictures": len(indices),
        "variants": variants,
        "corruptions": names,
        "captions": captions,
    }


def _augmented(
    dataset: Dataset, chain: Chain, indices: Tensor, variants: int, seed: int
) -> tuple[Tensor, list[list[str]]]:
    """Return images and their variants, (rows, columns, C, H, W), with a caption each."""
    split, labels = dataset.train, dataset.train.labels
    chain = chain.on(Tones(dataset.black, dataset.white))
    mixer = Mixer(chain.mixings, len(dataset.classes)) if chain.mixings else None

    def read(which: Tensor) -> Tensor:
        return split.uncut(which) if isinstance(split, Uncut) else split.images(which)

    images = read(indices)
    captions = [[dataset.classes[label]] for label in labels[indices].tolist()]
    columns = []
    for epoch in range(variants):
        keys = sample_keys("transform", seed, epoch, indices)
        changed = chain(images, keys)
        drawn = _drawn(chain, images, keys)
        if mixer is not None:
            mixing = sample_keys("mixing", seed, epoch, indices)
            partners = mixer.partners(mixing, len(split))
            others = chain(read(partners), sample_keys("transform", seed, epoch, partners))
            changed, targets = mixer(changed, others, labels[indices], labels[partners], mixing)
            drawn = [_joined(text, _shares(row, dataset)) for text, row in zip(drawn, targets, strict=True)]
        columns.append(changed)
        for row, text in zip(captions, drawn, strict=True):
            row.append(text)
    first = scaled(images, columns[0].shape[-1])  # a window leaves less of them
    return torch.stack([first, *columns], 1), captions


def _drawn(chain: Chain, images: Tensor, keys: Tensor) -> list[str]:
    """Return the random choices of a chain for each image of (B, C, H, W), as text."""
    # One by one: a chain goes through large images in parts, and each part would restart its random numbers.
    return [_drawn_for(chain, image[None], key[None]) for image, key in zip(images, keys, strict=True)]


def _drawn_for(chain: Chain, image: Tensor, key: Tensor) -> str:
    draws, found = RecordedDraws(key), ""
    (texts,) = draws.texts
    for transform in chain.transforms:
        start = len(texts)
        image = replace(chain, transforms=(transform,)).changed(image, draws)
        own = texts[start:]
        if own[:1] == ["no"]:  # further choices have no effect
            own = own[:1]
        elif own[:1] == ["yes"] and len(own) > 1:
            own = own[1:]
        found = _joined(found, f"{str(transform).partition('(')[0]} {' '.join(own)}".strip())
    return found


def _joined(first: str, second: str) -> str:
    return f"{first}, {second}" if first else second


def _shares(targets: Tensor, dataset: Dataset) -> str:
    shown = [(share, index) for index, share in enumerate(targets.tolist()) if share > 0]
    return " + ".join(f"{share:.2f} {dataset.classes[index]}" for share, index in sorted(shown, reverse=True))


def _corrupted(dataset: Dataset, indices: Tensor, names: list[str]) -> tuple[Tensor, list[list[str]]]:
    """Return images and what corruptions make of them, a row an image and corruption, with a caption each."""
    tones, images = Tones(dataset.black, dataset.white), dataset.train.images(indices)
    labels = dataset.train.labels[indices].tolist()
    rows, captions = [], []
    severities = range(1, SEVERITIES + 1)
    for name in names:
        columns = [images, *(corrupt(name, images, severity, indices, tones) for severity in severities)]
        rows.append(torch.stack(columns, 1))
        captions += [[dataset.classes[label], *(f"{name} {each}" for each in severities)] for label in labels]
    return torch.cat(rows), captions


TILE = 96
"""Smaller images are enlarged, by an integer factor, to at least this many pixels a side."""

_GAP = 4
_PAPER = 255
_INK = 40
_LETTER_SIDE = 11
_LINE = 13
_MOST_LINES = 8


def contact_sheet(images: Tensor, tones: Tones, captions: Sequence[Sequence[str]] = ()) -> Tensor:
    """Arrange images on a sheet.

    Args:
        images: (rows, columns, C, H, W) float, C being 1 or 3.
        tones: values of black and white in them.
        captions: a text below each; none: there is no room for any.

    Returns:
        (H', W', 3) uint8.
    """
    rows, columns = images.shape[:2]
    tiles = _bytes(images.flatten(0, 1), tones)
    factor = -(-TILE // min(tiles.shape[-2:]))
    if factor > 1:
        tiles = interpolate(tiles, scale_factor=factor, mode="nearest")
    tiles = tiles.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    height, width = tiles.shape[1:3]
    letters = max(1, int(width / (0.52 * _LETTER_SIDE)))
    broken = [[wrap(text, letters)[:_MOST_LINES] or [""] for text in row] for row in captions]
    below = [_LINE * max(map(len, row)) for row in broken] or [0] * rows
    row_heights = [height + 2 * _GAP + room for room in below]
    sheet = np.full((sum(row_heights), columns * (width + 2 * _GAP), 3), _PAPER, dtype=np.uint8)
    top = 0
    for row in range(rows):
        for column in range(columns):
            left = column * (width + 2 * _GAP) + _GAP
            sheet[top + _GAP : top + _GAP + height, left : left + width] = tiles[
                row * columns + column
            ].numpy()
        top += row_heights[row]
    if broken:
        _write(sheet, broken, row_heights, (height, width))
    return torch.from_numpy(sheet)


def _write(
    sheet: np.ndarray[Any, np.dtype[np.uint8]],
    texts: list[list[list[str]]],
    row_heights: list[int],
    tile: tuple[int, int],
) -> None:
    """Write lines of text below the tiles, in place."""
    height, width = tile
    image = Image.fromarray(sheet)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(_LETTER_SIDE)
    top = 0
    for row, room in zip(texts, row_heights, strict=True):
        for column, lines in enumerate(row):
            place = (column * (width + 2 * _GAP) + _GAP, top + height + _GAP)
            for number, line in enumerate(lines):
                pen.text((place[0], place[1] + number * _LINE), line, fill=(_INK,) * 3, font=font)
        top += room
    sheet[:] = np.asarray(image)


def _bytes(images: Tensor, tones: Tones) -> Tensor:
    black, white = tones.of(images)
    return ((images - black) * (255 / (white - black))).round_().clamp_(0, 255).to(torch.uint8)
