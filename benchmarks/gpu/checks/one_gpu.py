"""Part 2: one worker on one GPU is as fast as a loop of torch alone, and its input pipeline keeps up."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from checks.setting import Figures, Network, NotInstalled, Part, Row, Setting, hold

LEAST_SHARE = 0.98
"""Of the bare loop's images a second."""
LEAST_FED = 0.95
"""Share of the bare loop's rate that decoded files feed."""

NETWORKS = {
    "resnet50": Network("resnet50", 224, 256),
    "resnet50, compiled": Network("resnet50", 224, 256, compiled=True),
    "efficientnet_b0": Network("efficientnet_b0", 224, 256),
    "lenet5": Network("lenet5", 28, 64, channels=1, precision="bfloat16", channels_last=False),
    "lenet5, compiled": Network("lenet5", 28, 64, 1, "bfloat16", channels_last=False, compiled=True),
}
_MEASURED_S = 5.0
_WARM_S = 2.0


def network_of(setting: Setting, name: str) -> Network:
    """Return a network, small where the setting is quick."""
    network = NETWORKS[name]
    if not setting.quick:
        return network
    if network.channels == 1:
        return replace(network, batch=8)
    return replace(network, model="lenet5" if network.compiled else "cifar_resnet", side=32, batch=8)


def bare_row(name: str) -> str:
    """Return the name of the row of a bare loop."""
    return f"{name}: torch alone"


def bare(setting: Setting, name: str) -> Figures:
    """A loop of torch alone is measured."""
    return setting.loop("bare", network_of(setting, name))


def against_bare(setting: Setting, name: str, figures: Figures) -> Figures:
    """Return figures with their share of the bare loop's; raise `Failed` where it is too small."""
    share = figures["images_per_s"] / setting.earlier(bare_row(name), "images_per_s", figures)
    figures |= {"share": share}
    hold(setting.quick or share >= LEAST_SHARE, f"{share:.3f} of the bare loop's images/s", figures)
    return figures


def join(setting: Setting, name: str) -> Figures:
    """The same loop, distributed by `polyrhythm.join`, is as fast."""
    return against_bare(setting, name, setting.loop("join", network_of(setting, name)))


def train(setting: Setting, name: str) -> Figures:
    """`polyrhythm train` with one worker is as fast, its pictures in the GPU's memory."""
    network = network_of(setting, name)
    if network.channels == 1:
        return against_bare(setting, name, setting.loop("train", network))
    words = ("--data", str(setting.pictures(network.side, photographs=not setting.quick)), *network.words)
    measured = setting.measured(
        "train", *words, "--workers", "1", "--cache", "auto", skip_s=_WARM_S, seconds=_MEASURED_S
    )
    figures: Figures = {"images_per_s": measured.images_per_s, "seconds": measured.seconds}
    if measured.joules_per_image is not None:
        figures["joules_per_image"] = measured.joules_per_image
    return against_bare(setting, name, figures)


def fed(setting: Setting, way: str) -> Figures:
    """Photographs feed the network; the loader is named as the bottleneck where they do not."""
    network = network_of(setting, "resnet50")
    words = ["--data", str(setting.pictures(224, photographs=True)), *network.words, "--workers", "1"]
    words += ["--cache", "none"]
    if way == "decoded":
        words += ["--decoded", str(setting.folder / "decoded")]
    measured = setting.measured(
        "fed", *words, from_epoch=0, skip_s=0.0 if setting.quick else 4.0, seconds=_MEASURED_S
    )
    rate, bottleneck = measured.images_per_s, measured.bottleneck
    figures: Figures = {"images_per_s": rate, "bottleneck": bottleneck, "cores": setting.cores}
    figures["share"] = share = rate / setting.earlier(bare_row("resnet50"), "images_per_s", figures)
    if not setting.quick:
        hold(
            way != "decoded" or share >= LEAST_FED, f"{share:.3f} of the bare loop's images/s is fed", figures
        )
        hold(
            share >= LEAST_FED or bottleneck == "input",
            f"the loader feeds {share:.3f} of the bare loop's images/s, and {bottleneck} is named",
            figures,
        )
    return figures


def _loaded(setting: Setting, batches: Any) -> Figures:
    """Return the images a second of a peer's loader, whose batches come to the device."""
    batch, seen = network_of(setting, "resnet50").batch, list[float]()
    end_s = time.perf_counter() + (0.5 if setting.quick else 10.0)
    for images, _ in batches:
        images.to(setting.device, non_blocking=True)
        setting.finish()
        seen.append(time.perf_counter())
        if seen[-1] > end_s:
            break
    hold(len(seen) >= 3, f"only {len(seen)} batches were loaded")
    taken = seen[len(seen) // 3 :]  # the first ones have been prepared meanwhile
    each_s = (taken[-1] - taken[0]) / (len(taken) - 1)
    figures: Figures = {"images_per_s": batch / each_s}
    figures["median_s"] = statistics.median(later - one for one, later in pairwise(taken))
    whole = setting.earlier(bare_row("resnet50"), "images_per_s", figures)
    return figures | {"share": min(1.0, batch / each_s / whole)}


def torch_loader(setting: Setting) -> Figures:
    """Torch's DataLoader with as many processes as cores is measured on the same photographs."""
    import torch
    from torch.utils.data import DataLoader

    from polyrhythm.models.create import define_missing_operators

    define_missing_operators()
    from torchvision import datasets, transforms

    side = network_of(setting, "resnet50").side
    change = transforms.Compose(
        [transforms.Resize(side), transforms.CenterCrop(side), transforms.ToTensor(),
         transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )  # fmt: skip
    folder = Path(setting.pictures(224, photographs=True), "train")
    torch.set_num_threads(1)
    loader = DataLoader(
        datasets.ImageFolder(str(folder), change),
        batch_size=network_of(setting, "resnet50").batch,
        shuffle=True,
        num_workers=setting.cores,
        pin_memory=setting.is_gpu,
        drop_last=True,
    )
    return _loaded(setting, loader)


def dali(setting: Setting) -> Figures:
    """DALI, which decodes on the GPU, is measured on the same photographs."""
    if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
        raise NotInstalled("nvidia-dali")
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    network = network_of(setting, "resnet50")
    folder = str(Path(setting.pictures(224, photographs=True), "train"))

    @pipeline_def(batch_size=network.batch, num_threads=setting.cores, device_id=0)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="files")
        images = fn.decoders.image(files, device="mixed" if setting.is_gpu else "cpu")
        images = fn.resize(images, resize_shorter=network.side)
        images = fn.crop_mirror_normalize(
            images,
            crop=(network.side, network.side),
            dtype=types.FLOAT,
            mean=[123.7, 116.3, 103.5],
            std=[58.4, 57.1, 57.4],
        )
        return images, labels

    made = DALIGenericIterator([pipeline()], ["images", "labels"], reader_name="files")
    return _loaded(setting, ((batch[0]["images"], None) for batch in made))


def _rows() -> tuple[Row, ...]:
    seconds = {"resnet50, compiled": (60, 70, 0), "lenet5": (10, 20, 10), "lenet5, compiled": (18, 28, 0)}
    rows = []
    for name in NETWORKS:
        for kind, each, long_s in zip(
            ("torch alone", "train", "join"),
            (bare, train, join),
            seconds.get(name, (14, 26, 14)),
            strict=True,
        ):
            if long_s:  # compiling takes too long for all three
                rows.append(Row(f"{name}: {kind}", partial(each, name=name), long_s))
    rows += [
        Row("from JPEG files", partial(fed, way="files"), 22),
        Row("from decoded files", partial(fed, way="decoded"), 30),
        Row("from JPEG files by torch's DataLoader", torch_loader, 16),
        Row("from JPEG files by DALI", dali, 3),
    ]
    return tuple(rows)


PART = Part(2, "One GPU, whole speed", _rows())
