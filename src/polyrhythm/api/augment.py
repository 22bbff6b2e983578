"""A contact sheet of augmented pictures, as the verb `augment` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.contact_sheet import contact_sheet
from polyrhythm.augmentation.tones import Tones
from polyrhythm.data.dealing.seeding import generator_for, sample_keys
from polyrhythm.data.open import open_data
from polyrhythm.data.resized import scaled
from polyrhythm.errors import RequestError

_MOST = 100
"""Of pictures, and of variants of each, that one sheet can show."""


def augment(
    chain: str,
    preview: str | Path,
    *,
    data: Any = "fashion-mnist",
    pictures: int = 6,
    variants: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Writes a contact sheet: training pictures, each beside what augmentation makes of it in so many epochs.

    Args:
        chain: augmentations, as `train` takes them, such as `crop(padding=2); flip`.
        preview: the picture file to write; its ending says its format.
        data: a name, a folder or objects, as in `train`.
        pictures: how many, drawn from the training data that can be read.
        variants: of each.
        seed: chooses the pictures and their changes.

    Returns:
        `file`, `augment`, `pictures` and `variants`.

    Raises:
        RequestError: something in the request is wrong; nothing has been written.
    """
    path = Path(preview)
    if path.suffix.lower() not in Image.registered_extensions():
        raise RequestError(f"{path} has no ending of a picture format: name it {path.stem or 'preview'}.png")
    for what, number in (("pictures", pictures), ("variants", variants)):
        if not 1 <= number <= _MOST:
            raise RequestError(f"{what} must be from 1 to {_MOST}, as one sheet can show (given {number})")
    if not path.parent.is_dir():
        raise RequestError(f"there is no folder {path.parent}: make it first")
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
