"""What decoding pictures costs, and what keeping them decoded spares: batches of a folder of pictures, four ways.

    python benchmarks/input-pipeline/folders.py [--pictures 256] [--size 224] [--rounds 5] [--json]

Pictures are JPEG files of random colors, 400 by 500 pixels, made for the occasion. In each round one thread makes
all batches of an epoch from the files, from what was decoded to disk (`--decoded`), from memory (`--cache`), and from
a memory that holds half of them. Counted are the processor's seconds of that process, as medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from polyrhythm.data.cached_split import CachedSplit, CacheLimit, CachePlan
from polyrhythm.data.dataset import Split
from polyrhythm.data.decoded_files import keep_decoded
from polyrhythm.data.image_files import ImageFileSplit

BATCH = 32


def make_pictures(folder: Path, count: int) -> list[str]:
    """Writes pictures whose colors change softly, as those of photographs do."""
    random, paths = np.random.default_rng(0), []
    for number in range(count):
        coarse = Image.fromarray(random.integers(256, size=(20, 25, 3), dtype=np.uint8))
        paths.append(str(folder / f"{number}.jpg"))
        coarse.resize((500, 400), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths


def epoch_s(split: Split, clock: Callable[[], float]) -> float:
    """Makes an epoch's batches; gives the seconds."""
    order = torch.randperm(len(split))
    began = clock()
    for indices in order.split(BATCH):
        split.images(indices)
    return clock() - began


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--pictures", type=int, default=256)
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        paths = make_pictures(Path(scratch), chosen.pictures)
        files = ImageFileSplit(paths, torch.zeros(len(paths), dtype=torch.int64), chosen.size)
        whole = len(paths) * 3 * chosen.size**2
        began = time.perf_counter()
        ways: dict[str, Split] = {"files": files, "decoded": keep_decoded(files, Path(scratch, "kept"))}
        decoding_s = time.perf_counter() - began
        for name, limit in (("memory", whole), ("half in memory", whole // 2)):
            ways[name] = CachedSplit(files, CachePlan(limit=CacheLimit(limit)))
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(chosen.rounds + 1):
            for name, split in ways.items():
                # a file's decoder may run on a thread of its own, so the whole process counts
                seconds = epoch_s(split, time.process_time)
                if turn:  # the first fills the caches
                    times[name].append(seconds)
    per_s = {name: len(paths) / statistics.median(seconds) for name, seconds in times.items()}
    if chosen.json:
        print(json.dumps({"pictures_per_s": per_s, "decoding_s": decoding_s}))
        return
    print(f"{len(paths)} pictures to {chosen.size} pixels; decoding all to disk took {decoding_s:.1f} s")
    for name, rate in per_s.items():
        print(f"{name:15} {rate:9,.0f} pictures/s   {rate / per_s['files']:6.1f} times files")


if __name__ == "__main__":
    main()
