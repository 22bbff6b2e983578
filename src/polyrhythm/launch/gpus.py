"""Sharing a host's GPUs out among its workers: one replica a GPU."""

from __future__ import annotations

import torch


def gpu_of(device: torch.device, number: int) -> torch.device:
    """Gives the device of a host's worker.

    Args:
        device: where replicas live; anything but a GPU is the same for all.
        number: of the worker on its host, from 0. Workers beyond the last GPU share them again from the first on.
    """
    if device.type != "cuda":
        return device
    return torch.device("cuda", number % torch.cuda.device_count())
