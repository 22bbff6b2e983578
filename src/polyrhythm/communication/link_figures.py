"""Measuring the links of a group: every rank sends to the next one and hears the last one, all at once.

    empty   one empty message            L + o + β H
    burst   k empty messages in a row    L + k (o + β H)
    long    one of 1 MiB                 L + o + β (H + 1 MiB)

Medians of some rounds; the slowest rank's count, and rank 0 hands them out, so that all ranks know the same figures to
the last bit. The symbols are those of `cost.machine`.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from polyrhythm.communication.collective import receive, start_send
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.cost.machine import Machine

ROUNDS = 7
BURST = 8
LONG_BYTES = 1 << 20
_LEAST_SECONDS_PER_BYTE = 1e-13
"""Where noise hides the bytes: 10 TB/s."""


def measure_links(ranks: Communicator, tag: int = 0) -> Machine:
    """Measures latency, overhead and bandwidth; all ranks must call it, and all get the same.

    Args:
        ranks: at least two.
        tag: of the messages, which nobody else uses meanwhile.
    """
    empty, long = torch.empty(0, dtype=torch.uint8), torch.zeros(LONG_BYTES, dtype=torch.uint8)
    _pass_on_s(ranks, empty, 1, tag)  # opens the links, and waits for ranks that come late
    measured = [
        median(_pass_on_s(ranks, vector, messages, tag) for _ in range(ROUNDS))
        for vector, messages in ((empty, 1), (empty, BURST), (long, 1))
    ]
    empty_s, burst_s, long_s = _slowest(ranks, torch.tensor(measured, dtype=torch.float64), tag).tolist()
    seconds_per_byte = max(_LEAST_SECONDS_PER_BYTE, (long_s - empty_s) / LONG_BYTES)
    port_s = min(max(0.0, (burst_s - empty_s) / (BURST - 1)), empty_s)
    return Machine(
        latency_s=empty_s - port_s,
        overhead_s=max(0.0, port_s - seconds_per_byte * HEADER_BYTES),
        seconds_per_byte=seconds_per_byte,
        header_bytes=HEADER_BYTES,
    )


def _pass_on_s(ranks: Communicator, vector: Tensor, messages: int, tag: int) -> float:
    """Seconds until so many messages have gone to the next rank and come from the last one."""
    started_s = ranks.clock.now()
    handles = [start_send(ranks, (ranks.rank + 1) % ranks.size, vector, tag) for _ in range(messages)]
    for _ in range(messages):
        receive(ranks, (ranks.rank - 1) % ranks.size, tag, vector)
    for handle in handles:
        handle.wait()
    return ranks.clock.now() - started_s


def _slowest(ranks: Communicator, figures: Tensor, tag: int) -> Tensor:
    """Gives the largest of all ranks' figures, one by one."""
    if ranks.rank:
        start_send(ranks, 0, figures, tag).wait()
        return receive(ranks, 0, tag, figures)
    for source in range(1, ranks.size):
        figures = torch.maximum(figures, receive(ranks, source, tag, figures))
    for to in range(1, ranks.size):
        start_send(ranks, to, figures, tag).wait()
    return figures
