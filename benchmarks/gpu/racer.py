"""A loop over batches in the device's memory, by `polyrhythm.join` or PyTorch's DDP; started by torchrun.

torchrun --nproc-per-node=N racer.py polyrhythm|ddp cuda|cpu [quick]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WHO, DEVICE = sys.argv[1:3]
QUICK = sys.argv[3:] == ["quick"]
BATCH, WIDTH, WARM_UP, STEPS = (8, 8, 2, 5) if QUICK else (256, 128, 20, 200)


def network() -> nn.Module:
    """Return a small convolutional network, of some 20 MB in full size."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(4):
        wide = WIDTH * 2**stage
        layers += [nn.Conv2d(channels, wide, 3, stride=2, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def race(step: Callable[[], object], ranks: int) -> float:
    """Return images a second of all ranks."""
    for _ in range(WARM_UP):
        step()
    finish()
    began_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    finish()
    return ranks * BATCH * STEPS / (time.perf_counter() - began_s)


def finish() -> None:
    """Wait for whatever the device computes."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run one of the two."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if DEVICE == "cuda" else torch.device("cpu")
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    images = torch.randn(BATCH, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (BATCH,), device=device)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if WHO == "ddp":
        torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
        wrapped = DistributedDataParallel(model, device_ids=[device.index] if DEVICE == "cuda" else None)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()

        found = race(step, ranks)
        torch.distributed.destroy_process_group()
    else:
        import polyrhythm

        with polyrhythm.join("synchronous") as group:
            ours, updates = group.distribute(model, optimizer)

            def step() -> None:
                updates.zero_grad()
                nn.functional.cross_entropy(ours(images), labels).backward()
                updates.step()

            found = race(step, ranks)
    if rank == 0:
        print(f"images_per_s {found:.1f}", flush=True)


if __name__ == "__main__":
    main()
