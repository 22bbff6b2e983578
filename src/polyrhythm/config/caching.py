"""What is kept of decoded images: on disk for later runs, and in memory or on the GPU for later epochs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from polyrhythm.communication.transports.shared_memory.barrier import strongly_ordered
from polyrhythm.data.caching.cache_limit import CacheLimit
from polyrhythm.data.caching.cached_split import CachedSplit, CachePlan
from polyrhythm.data.caching.decoded_files import DecodedFiles, keep_decoded
from polyrhythm.data.caching.decoding import Decoding
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.pictures.image_folder import ImageFileSplit
from polyrhythm.data.windows import WindowSplit
from polyrhythm.errors import RequestError
from polyrhythm.launch.torchrun.spokesman import started_by_torchrun

if TYPE_CHECKING:
    import torch

    from polyrhythm.config.run_config import RunConfig
    from polyrhythm.data.dataset import Dataset, Split


def with_caches(dataset: Dataset, config: RunConfig, device: torch.device) -> Dataset:
    """Gives the same data, whose decoded images are kept as the configuration says.

    Raises:
        RequestError: there is nothing to keep of such data, or no room for it.
    """
    if config.decoded is not None:
        train, test = (
            _on_disk(split, config.decoded, dataset.name) for split in (dataset.train, dataset.test)
        )
        dataset = replace(dataset, train=train, test=test)
    limit = CacheLimit.parse(config.cache)
    if limit.size_bytes == 0:
        return dataset
    decoding = _inmost(dataset.train)
    needless = _needless(decoding, device)
    if needless and limit.size_bytes is None:
        return dataset
    if needless or not isinstance(decoding, Decoding):
        raise RequestError(f"cache {config.cache}: the images of {dataset.name} {needless}: leave cache out")
    cached = CachedSplit(decoding, _plan(limit, config.workers, device))
    return replace(dataset, train=_instead(dataset.train, cached))


def _inmost(split: Split) -> Split:
    """Gives what windows are cut out of, or the split itself."""
    return split.larger if isinstance(split, WindowSplit) else split


def _instead(split: Split, inmost: Split) -> Split:
    """Gives a split with another one in the place of its inmost."""
    return split.over(inmost) if isinstance(split, WindowSplit) else inmost


def _on_disk(split: Split, folder: str, name: str) -> Split:
    files = _inmost(split)
    if not isinstance(files, ImageFileSplit):
        raise RequestError(
            f"decoded keeps what image files hold, and {name} is not made of them: leave it out"
        )
    return _instead(split, keep_decoded(files, folder))


def _needless(split: Split, device: torch.device) -> str:
    """Says why a cache would be of no use; nothing if it would."""
    if not isinstance(split, Decoding):
        return "are not decoded here, or differ each time"
    if device.type == "cpu" and isinstance(split, TensorSplit):
        return "are in memory already"
    if device.type == "cpu" and isinstance(split, DecodedFiles):
        return "are kept by the system, as files that were read"
    return ""


def _plan(limit: CacheLimit, workers: int, device: torch.device) -> CachePlan:
    apart = started_by_torchrun()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if apart else workers
    # A process sees an image as kept only after its bytes, where stores become visible in their order.
    shared = device.type == "cpu" and not apart and strongly_ordered()
    return CachePlan(limit=limit, processes=processes, shared=shared)
