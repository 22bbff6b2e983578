"""Data sets opened by name, by folder, or from a user's own objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from polyrhythm.data.dataset import Dataset, from_objects
from polyrhythm.data.dealing import Dealt
from polyrhythm.data.image_files import ImageSource
from polyrhythm.data.images import CENTRAL_SHARE
from polyrhythm.data.remote import is_location, local_copy
from polyrhythm.data.resized import resized, windowed
from polyrhythm.data.sources.hugging_face import FILES, HUB, HuggingFace, holds_pictures, is_saved
from polyrhythm.data.sources.image_folder import ImageFolder
from polyrhythm.data.sources.manifest import SUFFIXES, Manifest
from polyrhythm.data.sources.tar_shards import TarShards
from polyrhythm.errors import RequestError, unknown
from polyrhythm.specs import Config, Spec, choices, parse, validated

SOURCES = "polyrhythm.data.sources"
_OF_YOUR_OWN = (
    "or a folder of images, a table ending in .csv, .tsv or .parquet, or tar files ending in .tar, or hf://OWNER/NAME, "
    "or a location of fsspec such as s3://bucket/photos"
)


@runtime_checkable
class Source(Protocol):
    """A source of data: a choice of the folder `sources`."""

    def load(self) -> Dataset:
        """Return the data, downloaded first if necessary."""


def open_data(
    source: str | object,
    *,
    image_size: int | None = None,
    scale: int | None = None,
    skip_unreadable: bool = False,
    pixels: str | None = None,
    dealt: Dealt = None,
) -> Dataset:
    """Open a data set.

    Args:
        source: a name (`fashion-mnist`, `digits`); a name and its folder (`fashion-mnist=FOLDER`); a spec;
            the path of a folder of images, as a text with a `/` or the name of an existing folder; the path of a
            manifest (.csv, .tsv, .parquet) or of tar shards (`train-*.tar`); a data set of the hub (`hf://OWNER/NAME`),
            or what the library `datasets` keeps in files (.parquet, .arrow); a location of fsspec
            (`s3://bucket/photos`, `hdfs://…`), copied to the cache; a `Source`; or objects, see
            `dataset.from_objects`. A known name takes precedence over a folder of that name: write `./digits`.
        image_size: pixels a side of the images; None: as stored (encoded images: 224).
        scale: pixels a side to which the whole center square of an image is scaled, for windows of `image_size`
            (None: 224/256 of the scale) to be cut out; None: images are the center 224/256 of that square.
        skip_unreadable: leave out image files that cannot be read (`Dataset.skipped`) instead of refusing the data.
        pixels: normalization of image files; None: that of ImageNet. Other data are not affected.
        dealt: earlier assignment to training and test images, where the data have no test images.

    Raises:
        RequestError: unknown or unusable data, with the reason and what to do.
    """
    found = source_of(source)
    if scale is not None:
        options = {"skip_unreadable": skip_unreadable, "pixels": pixels, "dealt": dealt}
        return _windows(found, scale, image_size, **options)
    if isinstance(found, Config) and "pixels" in type(found).model_fields:
        wanted = {"image_size": image_size, "skip_unreadable": skip_unreadable or None, "pixels": pixels}
        given = {key: value for key, value in wanted.items() if value is not None}
        name = found.name.replace("_", "-")
        filled = validated(f"data {name}", type(found), {**found.model_dump(), **given})
        if isinstance(filled, ImageSource):
            filled = filled.dealt_as(dealt)
        return cast("Source", filled).load()
    dataset = found.load() if isinstance(found, Source) else from_objects(found)
    return dataset if image_size is None else resized(dataset, image_size)


def source_of(given: object) -> object:
    """Return the source that a text names; objects are returned as they are."""
    return _source(given) if isinstance(given, str | Path) else given


def _windows(found: object, scale: int, image_size: int | None, **options: Any) -> Dataset:
    if isinstance(found, Config) and "shown" in type(found).model_fields:
        name = found.name.replace("_", "-")
        found = validated(f"data {name}", type(found), {**found.model_dump(), "shown": 1.0})
    return windowed(open_data(found, image_size=scale, **options), image_size or round(CENTRAL_SHARE * scale))


def _source(given: str | Path) -> Source:
    text = str(given).strip()
    known = choices(SOURCES)
    name = _name(text)
    if isinstance(given, str) and name in known:
        return _built(known[name], text, name)
    if isinstance(given, str) and is_location(text):
        text = local_copy(text)
    if text.startswith(HUB) or _is_table_of_pictures(text):
        return HuggingFace(path=text)
    if text.lower().endswith(SUFFIXES):
        return Manifest(file=text)
    if text.lower().endswith(".tar"):
        return TarShards(files=text)
    if isinstance(given, Path) or "/" in text or (text and os.path.isdir(text)):
        return ImageFolder(folder=text)
    error = unknown("data", text, (key.replace("_", "-") for key in known))
    raise RequestError(f"{error} ({_OF_YOUR_OWN}); {os.getcwd()} has no folder of that name")


def _is_table_of_pictures(text: str) -> bool:
    path = Path(text).expanduser()
    if not text.lower().endswith(FILES):
        return bool(text) and os.path.isdir(path) and is_saved(path)
    return "*" in text or text.lower().endswith(FILES[1]) or holds_pictures(path)


def _name(text: str) -> str:
    """Return the module name of a source: the text before the first `(` or `=`."""
    return text.partition("(")[0].partition("=")[0].strip().replace("-", "_")


def _built(kind: type[Config], text: str, name: str) -> Source:
    if "(" in text.partition("=")[0]:
        arguments: dict[str, Any] = parse(name + text[text.index("(") :]).arguments
    else:
        folder = text.partition("=")[2].strip()
        arguments = Spec(name, {"folder": folder} if folder else {}).arguments
    return cast("Source", validated(f"data {name.replace('_', '-')}", kind, arguments))
