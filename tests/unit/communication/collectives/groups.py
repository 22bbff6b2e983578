"""Groups of simulated ranks that all do the same, for tests of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, MessageCollective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork, Route
from polyrhythm.communication.transports.simulated.network import Action, ConstantNetwork, Network
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.cost.machine import Machine
from polyrhythm.specs import build, choices

ALPHA, BETA = 1e-4, 1e-9
MACHINE = Machine(latency_s=ALPHA, seconds_per_byte=BETA, header_bytes=HEADER_BYTES)

SPECS = [
    *(name for name, kind in choices(COLLECTIVES).items() if issubclass(kind, MessageCollective)),
    "segmented_chain(segments=5)",
    "two_level(group=3, inside=direct)",
    "two_level(group=4, between=rabenseifner)",
]
"""Every collective over messages, found by itself, and some variations."""


def sizes(ranks: int) -> list[int]:
    """Gives the awkward numbers of elements, and an ordinary one."""
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 211, 3600})


def collective(spec: str) -> MessageCollective:
    """Builds a collective over messages."""
    built = build("collective", spec, COLLECTIVES)
    assert isinstance(built, MessageCollective)
    return built


@dataclass
class Group:
    """Simulated ranks.

    Attributes:
        time: theirs.
        network: theirs.
        cluster: they themselves.
        messages: how many each rank has sent, header or not.
    """

    time: VirtualTime
    network: Network
    cluster: SimulatedCluster
    messages: Counter[int] = field(default_factory=Counter)

    def run(
        self, work: Callable[[Communicator], Any], starts_s: Callable[[int], float] | None = None
    ) -> list[Any]:
        """Lets every rank do some work, from its own time on; gives what they return."""
        found: list[Any] = [None] * len(self.cluster.ranks)

        def play(rank: int) -> None:
            if starts_s is not None:
                self.time.sleep(starts_s(rank))
            found[rank] = work(self.cluster.communicator(rank))

        for rank in range(len(found)):
            self.time.spawn(f"rank {rank}", lambda rank=rank: play(rank))
        self.time.run()
        return found

    def payload_sent(self, rank: int) -> int:
        """Bytes that a rank has sent, without headers."""
        return self.cluster.ranks[rank].bytes_sent - HEADER_BYTES * self.messages[rank]


def uncontended(ranks: int) -> Group:
    """Ranks that send one message at a time, and receive any number."""
    time = VirtualTime()
    return _counted(time, ConstantNetwork(time, ALPHA, 1 / BETA), ranks)


def contended(ranks: int) -> Group:
    """Ranks with a NIC each: what it sends, and what it receives, share it fairly."""
    time = VirtualTime()
    network = ContendedNetwork(
        time, [1 / BETA] * 2 * ranks, lambda source, to: Route((source, ranks + to), ALPHA)
    )
    return _counted(time, network, ranks)


def _counted(time: VirtualTime, network: Network, ranks: int) -> Group:
    messages: Counter[int] = Counter()
    return Group(time, network, SimulatedCluster(time, _Counting(network, messages), ranks), messages)


class _Counting:
    def __init__(self, inner: Network, messages: Counter[int]) -> None:
        self._inner = inner
        self._messages = messages

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        self._messages[source] += 1
        self._inner.transfer(source, to, nbytes, sent, arrived)


def whole_numbers(ranks: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draws a vector a rank, of numbers whose sums are exact; the same every time."""
    generator = torch.Generator().manual_seed(1000 * ranks + size)
    return list(torch.randint(-1000, 1000, (ranks, size), generator=generator).to(dtype))


def fractions(ranks: int, size: int) -> list[Tensor]:
    """Draws a vector a rank, of numbers of all magnitudes whose sums depend on their order."""
    generator = torch.Generator().manual_seed(ranks + size)
    values = torch.randn(ranks, size, generator=generator)
    return list(values * 10 ** torch.randn(ranks, size, generator=generator))


def reduced(group: Group, kind: MessageCollective, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Adds up copies of tensors, one a rank; gives each rank's result."""
    results = [tensor.clone() for tensor in tensors]
    group.run(lambda communicator: kind.all_reduce(communicator, results[communicator.rank], 7))
    return results
