"""Measuring the links of a group: neighbours play ping-pong, first 0 with 1, 2 with 3 and so on, then 1 with 2, ….

    empty   an empty message there, one back           2 (L + o + β H)
    burst   k empty messages in a row, then one back   2 (L + o + β H) + (k-1) (o + β H)
    long    one of 1 MiB there, an empty one back      2 (L + o + β H) + β MiB

The quickest of some rounds counts, as others' work can only make one longer; of the pairs, the slowest. Rank 0 hands
the figures out, so that all ranks know the same to the last bit. The symbols are those of `cost.machine`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.communication.collective import receive, start_send
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.cost.machine import Machine

ROUNDS = 9
WARMING_UP = 1  # in which links are opened, and ranks that come late are waited for
BURST = 8
LONG_BYTES = 1 << 20
STROKES = ((1, 0), (BURST, 0), (1, LONG_BYTES))  # messages there, and bytes of each
_LEAST_SECONDS_PER_BYTE = 1e-13
"""Where noise hides the bytes: 10 TB/s."""


def measure_links(ranks: Communicator, tag: int = 0) -> Machine:
    """Measures latency, overhead and bandwidth; all ranks must call it, and all get the same.

    Args:
        ranks: at least two.
        tag: of the messages, which nobody else uses meanwhile.
    """
    measured = torch.zeros(3, dtype=torch.float64)
    for turn in (0, 1):
        serves = ranks.rank % 2 == turn
        peer = ranks.rank + 1 if serves else ranks.rank - 1
        if 0 <= peer < ranks.size:
            figures = [_quickest_s(ranks, peer, serves, stroke, tag) for stroke in STROKES]
            if serves:
                measured = torch.tensor(figures, dtype=torch.float64)
    empty_s, burst_s, long_s = largest(ranks, measured, tag).tolist()
    seconds_per_byte = max(_LEAST_SECONDS_PER_BYTE, (long_s - empty_s) / LONG_BYTES)
    port_s = min(max(0.0, (burst_s - empty_s) / (BURST - 1)), empty_s / 2)
    return Machine(
        latency_s=empty_s / 2 - port_s,
        overhead_s=max(0.0, port_s - seconds_per_byte * HEADER_BYTES),
        seconds_per_byte=seconds_per_byte,
        header_bytes=HEADER_BYTES,
    )


def _quickest_s(ranks: Communicator, peer: int, serves: bool, stroke: tuple[int, int], tag: int) -> float:
    """Plays some rounds; gives who serves the seconds of the quickest."""
    there, back = torch.zeros(stroke[1], dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    rounds = []
    for _ in range(WARMING_UP + ROUNDS):
        started_s = ranks.clock.now()
        handles = [start_send(ranks, peer, there, tag) for _ in range(stroke[0] if serves else 0)]
        for _ in range(1 if serves else stroke[0]):
            receive(ranks, peer, tag, back if serves else there)
        handles += [] if serves else [start_send(ranks, peer, back, tag)]
        for handle in handles:
            handle.wait()
        rounds.append(ranks.clock.now() - started_s)
    return min(rounds[WARMING_UP:])


def largest(ranks: Communicator, figures: Tensor, tag: int = 0) -> Tensor:
    """Gives the largest of all ranks' figures, one by one; all ranks must call it, and all get the same.

    Args:
        ranks: at least two.
        figures: `(n,)`, of this rank.
        tag: of the messages, which nobody else uses meanwhile.
    """
    if ranks.rank:
        start_send(ranks, 0, figures, tag).wait()
        return receive(ranks, 0, tag, figures)
    for source in range(1, ranks.size):
        figures = torch.maximum(figures, receive(ranks, source, tag, figures))
    for to in range(1, ranks.size):
        start_send(ranks, to, figures, tag).wait()
    return figures
