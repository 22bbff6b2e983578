"""Sharing out the cores and GPUs of a host among its ranks.

Workers compute with the threads that their share of the cores allows; each replica has one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from polyrhythm.errors import RequestError
from polyrhythm.strategies.strategy import Strategy


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(usable_cores())


def threads_for_worker(cores: int, workers: int, strategy: Strategy, servers: int | None = None) -> int:
    """Return the number of compute threads of each worker on a host.

    Servers that share hosts with workers take their share of the cores only while they have something to add up;
    dedicated ones keep a core each. `servers` on the host: None counts all.
    """
    traits = strategy.traits(workers)
    keeping = traits.servers if servers is None else servers
    left = cores - keeping if traits.placement.dedicated else cores
    return max(1, left // workers)


def use_threads(count: int) -> None:
    """Use `count` compute threads from now on, in this process."""
    torch.set_num_threads(count)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Use `threads` compute threads in the body: sums over several are added in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_of_worker(devices: Sequence[torch.device], worker: int) -> torch.device:
    """Return the device of a host's worker, where they have several kinds; those on GPUs take one after the other."""
    return gpu_of(devices[worker], sum(device.type == "cuda" for device in devices[:worker]))


def threads_next_to_gpus(cores: int, devices: Sequence[torch.device], worker: int) -> int:
    """Return the compute threads of a worker, where some compute on GPUs: those keep a core each to feed them."""
    fed = sum(device.type == "cuda" for device in devices)
    if devices[worker].type == "cuda":
        return 1
    return max(1, (cores - fed) // (len(devices) - fed))


def gpu_of(device: torch.device, number: int) -> torch.device:
    """Return the device of a host's worker of this number, from 0; workers beyond the last GPU share from the first on.

    Anything but a GPU is the same for all.
    """
    if device.type != "cuda":
        return device
    return torch.device("cuda", number % torch.cuda.device_count())


def use_gpu_of(device: torch.device) -> None:
    """Make a worker's GPU the current one of this thread, where it has a number; a no-op for other devices.

    `torch.cuda.manual_seed` and whatever else names no device mean the current one, which is the host's first at first.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def check_kinds_of_devices(
    strategy: Strategy, workers: int, found: str = "", instead: str = "as by --device cpu"
) -> None:
    """Refuse that some workers compute on GPUs and others do not, where the bits of all must agree.

    Args:
        strategy: strategy of the run.
        workers: number of workers.
        found: description of the workers' devices, to begin the error message with.
        instead: remedy that gives all workers one kind of device, to end the message with.

    Raises:
        RequestError: workers need one kind of device and have several, or share one vector in host memory.
    """
    reason = why_one_kind_of_device(strategy, workers)
    if reason:
        raise RequestError(
            f"{found}workers of {strategy} {reason}: take parameter_server(consistency=synchronous), local_sgd, or one "
            f"kind of device, {instead}"
        )


def why_one_kind_of_device(strategy: Strategy, workers: int) -> str:
    """Return the reason why GPUs and CPUs cannot mix with this strategy and number of workers; empty: they can."""
    traits = strategy.traits(workers)
    if traits.cuts_network:
        return "compute one network together"
    if traits.one_host:
        return "share a vector in their host's memory"
    if traits.identical and not traits.servers:
        return (
            "update each its own copy of one model, which GPUs and CPUs round differently, so that the copies would "
            "part"
        )
    return ""
