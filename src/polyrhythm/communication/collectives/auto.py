"""Auto: the quickest of the others, by their formulas and by what the links are measured to be.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, for
choosing by the size of the vector.

    collective(M) = argmin over c of T_c(N, M; L, o, β)

L = latency_s, o = overhead_s, β = 1 / bandwidth_bytes_per_s. Departure: the thresholds between algorithms are
not fixed but follow from links measured once, at the start, by all ranks together; all get the same figures,
and so the same choice. It is made for every size, assumes equal links, and weighs only algorithms over
messages: `library` has no formula, and `two_level` needs the hosts. Ranks that regroup do not measure again,
since that may take longer than the next of them lives: figures that any of them has count for all.

To measure the links, neighbors play ping-pong, first 0 with 1, 2 with 3 and so on, then 1 with 2, …:

    empty   an empty message there, one back           2 (L + o + β H)
    burst   k empty messages in a row, then one back   2 (L + o + β H) + (k-1) (o + β H)
    long    one of 1 MiB there, an empty one back      2 (L + o + β H) + β MiB

H are the bytes of a header; the symbols are those of `cost.machine`. The quickest of some rounds counts, as
the work of others can only make one longer; of the pairs, the slowest. Rank 0 hands the figures out, so that
all ranks know the same to the last bit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from polyrhythm.communication.collective import Collective, MessageCollective, receive, start_send
from polyrhythm.communication.collectives.binomial_tree import BinomialTree
from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.collectives.flat import Flat
from polyrhythm.communication.collectives.rabenseifner import Rabenseifner
from polyrhythm.communication.collectives.recursive_doubling import RecursiveDoubling
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.collectives.segmented_chain import SegmentedChain
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.errors import RequestError

ROUNDS = 9
WARMING_UP = 1  # links are opened, and late ranks are waited for
BURST = 8
LONG_BYTES = 1 << 20
STROKES = ((1, 0), (BURST, 0), (1, LONG_BYTES))  # messages there, and bytes of each
_LEAST_SECONDS_PER_BYTE = 1e-13
"""Lower bound where noise hides the bytes: 10 TB/s."""


def measure_links(ranks: Communicator, tag: int = 0) -> Machine:
    """Measure latency, overhead and bandwidth; all ranks must call it, and all get the same figures.

    Args:
        ranks: communicator with at least two members.
        tag: tag of the messages, which no other process uses in the meantime.
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
    """Play some rounds; return, on the rank that serves, the seconds of the quickest."""
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
    """Return the element-wise maximum over all ranks; all ranks must call it, and all get the same result.

    Args:
        ranks: communicator with at least two members.
        figures: `(n,)`, numbers of this rank.
        tag: tag of the messages, which no other process uses in the meantime.
    """
    if ranks.rank:
        start_send(ranks, 0, figures, tag).wait()
        return receive(ranks, 0, tag, figures)
    for source in range(1, ranks.size):
        figures = torch.maximum(figures, receive(ranks, source, tag, figures))
    for to in range(1, ranks.size):
        start_send(ranks, to, figures, tag).wait()
    return figures


_NEAR = 1.01
"""Times within a hundredth of the least are taken for equal."""

_TYPICAL = Machine(latency_s=1e-4, seconds_per_byte=8e-9, header_bytes=HEADER_BYTES)
"""Assumption of ranks that regroup if all ranks with measured links are lost: 1 Gb/s."""


class Auto(Collective):
    """The quickest of the collectives over messages, for the links as they are and the size at hand.

    Attributes:
        latency_s: latency of the links in seconds, as far as consecutive messages share it; default: measured.
        overhead_s: overhead in seconds of every message at its sender; measured with the latency.
        bandwidth_bytes_per_s: bandwidth in bytes/s of the links; default: measured.
    """

    latency_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    overhead_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    bandwidth_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    _measured: bool = PrivateAttr(default=False)
    _passed_on: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _check(self) -> Auto:
        if (self.latency_s is None) != (self.bandwidth_bytes_per_s is None):
            raise RequestError(
                "auto: give both latency_s and bandwidth_bytes_per_s, or neither to measure them"
            )
        if self.latency_s is None and self.overhead_s:
            raise RequestError(
                "auto: overhead_s goes with latency_s and bandwidth_bytes_per_s: give all three"
            )
        return self

    def prepared(self, ranks: Communicator, tag: int = 0) -> Auto:
        """Return the choice with measured figures, unless it was given some."""
        if ranks.size == 1 or (self.latency_s is not None and not self._passed_on):
            return self
        found = self._recalled(ranks, tag) if self._passed_on else measure_links(ranks, tag)
        prepared = Auto(
            latency_s=found.latency_s,
            overhead_s=found.overhead_s,
            bandwidth_bytes_per_s=1 / found.seconds_per_byte,
        )
        prepared._measured = True
        return prepared

    def passed_on(self) -> Auto:
        """Return the choice that does not measure, but asks all what they know; figures that were given all know."""
        if self.latency_s is not None and not self._measured and not self._passed_on:
            return self
        others = self.model_copy()
        others._passed_on = True
        return others

    def _recalled(self, ranks: Communicator, tag: int) -> Machine:
        own = [0.0] * 3
        if self.latency_s is not None:
            own = [self.latency_s, self.overhead_s, self._machine().seconds_per_byte]
        latency_s, overhead_s, seconds_per_byte = largest(
            ranks, torch.tensor(own, dtype=torch.float64), tag
        ).tolist()
        if not seconds_per_byte:
            return _TYPICAL
        return Machine(
            latency_s=latency_s,
            overhead_s=overhead_s,
            seconds_per_byte=seconds_per_byte,
            header_bytes=HEADER_BYTES,
        )

    def choice(self, ranks: int, payload: Payload) -> MessageCollective:
        """Return the quickest collective; of those within a hundredth of it, the first in the order of `_quickest`.

        Noise must not decide between equal ones; the order prefers few messages, and neighbors' links.

        Raises:
            RequestError: nothing has been measured or given.
        """
        return _quickest(self._machine(), ranks, payload)

    def all_reduce(self, ranks: Communicator, tensor: Tensor, tag: int = 0) -> None:
        """Add `tensor` up by the choice for its size; measure first, every time, if it is not prepared."""
        if ranks.size > 1:
            payload = Payload(tensor.numel(), tensor.element_size())
            self.prepared(ranks, tag).choice(ranks.size, payload).all_reduce(ranks, tensor, tag)

    def _machine(self) -> Machine:
        if self.latency_s is None or self.bandwidth_bytes_per_s is None:
            raise RequestError("auto has not measured the links: ask what prepared(communicator) gives")
        return Machine(
            latency_s=self.latency_s,
            overhead_s=self.overhead_s,
            seconds_per_byte=1 / self.bandwidth_bytes_per_s,
            header_bytes=HEADER_BYTES,
        )


@lru_cache(maxsize=1024)
def _quickest(machine: Machine, ranks: int, payload: Payload) -> MessageCollective:
    overhead_bytes = max(1.0, machine.port_s(0) / machine.seconds_per_byte)
    candidates = (
        RecursiveDoubling(),
        BinomialTree(),
        Flat(),
        Rabenseifner(),
        Ring(),
        Direct(),
        SegmentedChain(overhead_bytes=overhead_bytes),
    )
    estimated_s = [candidate.seconds(machine, ranks, payload) for candidate in candidates]
    bound_s = min(estimated_s) * _NEAR
    return next(candidate for candidate, each in zip(candidates, estimated_s, strict=True) if each <= bound_s)
