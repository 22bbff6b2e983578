"""What a link between two ranks takes: latency and bandwidth, from messages that go there and back.

    empty    there and back = 2 α + 128 bytes of headers, which count as nothing
    large    there, an empty one back = 2 α + M β

Medians of several tries: a busy machine has outliers on one side only.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message

LARGE_BYTES = 8 << 20
_WARM_UP = 3
_EMPTY_TRIPS = 50
_MOST_LARGE_TRIPS = 9
_PATIENCE_S = 2.0
"""How long the large messages of a link may take together, once there have been three."""

_FEWEST_LARGE_TRIPS = 3


@dataclass(frozen=True)
class MeasuredLink:
    """A link, as messages between ranks find it.

    Attributes:
        latency_s: α, of an empty message.
        bandwidth_bytes_per_s: 1/β.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Gives its facts, JSON-able."""
        return dict(vars(self))


def measure_link(network: Communicator, to: int, nbytes: int = LARGE_BYTES) -> MeasuredLink:
    """Measures the link to another rank, which calls `answer_link` meanwhile.

    Args:
        network: used by nobody else meanwhile.
        to: the other rank.
        nbytes: of a large message.

    Raises:
        PeerLost: the other rank is gone.
    """
    for _ in range(_WARM_UP):
        _trip_s(network, to, None)
    empty_s = statistics.median(_trip_s(network, to, None) for _ in range(_EMPTY_TRIPS))
    payload = torch.ones(nbytes, dtype=torch.uint8)
    _trip_s(network, to, payload)  # the first one finds buffers still to be made
    large: list[float] = []
    while len(large) < _FEWEST_LARGE_TRIPS or (len(large) < _MOST_LARGE_TRIPS and sum(large) < _PATIENCE_S):
        large.append(_trip_s(network, to, payload))
    network.send(to, Message(Kind.LEAVE))
    moving_s = max(statistics.median(large) - empty_s, 1e-9)
    return MeasuredLink(empty_s / 2, nbytes / moving_s)


def answer_link(network: Communicator, source: int) -> None:
    """Answers another rank's `measure_link` until it has measured."""
    while network.receive(source)[1].kind is not Kind.LEAVE:
        network.send(source, Message(Kind.REPORT))


def _trip_s(network: Communicator, to: int, payload: torch.Tensor | None) -> float:
    started_at = network.clock.now()
    network.send(to, Message(Kind.VECTOR, payload))
    network.receive(to)
    return network.clock.now() - started_at
