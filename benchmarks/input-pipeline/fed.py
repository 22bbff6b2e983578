"""Whether the loader keeps two training workers fed: what they wait for their batches, and what a picture costs.

    python benchmarks/input-pipeline/fed.py [--model resnet18] [--images 96] [--epochs 2] [--cores-a-worker 1]

Two workers train on a folder of JPEG photographs, decoded, cut to windows of 224 out of 256 and augmented meanwhile:
once decoding in every epoch, once with a cache. What they wait for data is a lap of the same stopwatch as the rest of
a step (`--timings`). Beside it, in processor seconds, what a picture costs the loader, and what it costs the network.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image
from torch.nn.functional import cross_entropy

import polyrhythm
from polyrhythm.api.train import prepare_process
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.data.loader import Loader, Share
from polyrhythm.roles.job import CheckpointConfig

AUGMENT = "flip; color_casting; vignetting; rotation; stretching; lens_distortion"
CLASSES = {"roofs": "china.jpg", "flower": "flower.jpg"}
LONG, SHORT = 500, 375
"""Pixels a side of the photographs, which is what ImageNet's have on average."""


def write_photographs(folder: Path, images: int) -> None:
    """Writes windows of scikit-learn's two photographs as JPEG, and four more to test with."""
    numbers = np.random.default_rng(0)
    for name, photograph in CLASSES.items():
        pixels = load_sample_image(photograph)
        for number in range(images // len(CLASSES) + 2):
            path = folder / ("train" if number > 1 else "test") / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            top = numbers.integers(0, pixels.shape[0] - SHORT)
            left = numbers.integers(0, pixels.shape[1] - LONG)
            Image.fromarray(pixels[top : top + SHORT, left : left + LONG]).save(path, quality=90)


def waiting(data: Path, cache: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Trains; gives the share of the workers' steps that they waited for data, and what the cache held."""
    run = polyrhythm.train(
        data=str(data),
        model=chosen.model,
        image_size=224,
        scale=256,
        augment=AUGMENT,
        cache=cache,
        workers=2,
        threads=chosen.cores_a_worker,
        batch_size=8,
        epochs=chosen.epochs,
        keep_checkpoints=0,
        timings=True,
        out=data.parent / cache,
        start_method="fork",
    )
    assert run is not None
    workers = run.figures["timings"]["workers"]
    seconds = sum(worker["seconds"] for worker in workers)
    return {
        "cache": cache,
        "hit_share": (run.figures.get("cache") or {}).get("hit_share", 0.0),
        "images_per_s": round(run.figures["images_per_s"], 2),
        "waited_for_data": round(sum(worker["data_s"] for worker in workers) / seconds, 4),
    }


def costs(data: Path, model: str, images: int) -> dict[str, float]:
    """Return the processor milliseconds that a picture costs the loader, decoded and from memory, and the network."""
    job = assemble(
        configure(
            {
                "data": str(data),
                "model": model,
                "image_size": 224,
                "scale": 256,
                "augment": AUGMENT,
                "workers": 1,
            }
        ),
        CheckpointConfig(),
    )
    network, share = job.make_model(), Share(0, 1, 8, seed=0)
    loader = Loader(job.dataset.train, share, job.learning.transform)
    spent = {}
    for name in ("decoded", "kept"):  # the second time, the cache has them
        started_s = time.process_time()
        batches = list(loader.epoch(0))
        spent[name] = time.process_time() - started_s
    started_s = time.process_time()
    for batch in batches:
        cross_entropy(network(batch.images), batch.labels).backward()
    spent["network"] = time.process_time() - started_s
    return {name: round(1000 * seconds / images, 2) for name, seconds in spent.items()}


def main() -> None:
    """Measures both, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--cores-a-worker", type=int, default=1)
    chosen = parser.parse_args()
    prepare_process()
    with TemporaryDirectory() as scratch:
        data = Path(scratch) / "photos"
        write_photographs(data, chosen.images)
        spent = costs(data, chosen.model, chosen.images)
        found = [waiting(data, cache, chosen) for cache in ("none", "auto")]
    print(
        json.dumps({"model": chosen.model, "processor_ms_a_picture": spent, "two_workers": found}, indent=2)
    )


if __name__ == "__main__":
    main()
