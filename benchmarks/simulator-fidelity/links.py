"""What one link between two ranks takes: the line through the times of a large and of a small message."""

from __future__ import annotations

import torch

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.planning.link import MeasuredLink, answer_link

SMALL_PART = 32
"""Of a model: about what a collective's or a shard's smallest messages are."""

TRIPS = 25
"""Of which the fastest counts: a machine that does other things makes some longer, and none shorter."""

_LEAST_SECONDS_PER_BYTE = 1e-12
"""Where noise hides the bytes, as inside a host."""


def link_to_next(network: Communicator, nbytes: int) -> MeasuredLink | None:
    """Measures the link from rank 0 to rank 1; both call it, and rank 0 is told.

    A message with a payload waits for its receiver twice, with its header and with its payload, so α is the line's
    value at no bytes and not the time of an empty message.

    Args:
        network: of two ranks.
        nbytes: of the largest message.
    """
    if network.rank != 0:
        answer_link(network, 0)
        return None
    small_bytes = nbytes // SMALL_PART
    _fastest_trip_s(network, nbytes)  # the first ones find buffers still to be made, and windows still small
    back_s = _fastest_trip_s(network, 0) / 2
    small_s, large_s = (_fastest_trip_s(network, size) - back_s for size in (small_bytes, nbytes))
    seconds_per_byte = max(_LEAST_SECONDS_PER_BYTE, (large_s - small_s) / (nbytes - small_bytes))
    latency_s = max(0.0, small_s - seconds_per_byte * small_bytes)
    network.send(1, Message(Kind.LEAVE))
    return MeasuredLink(latency_s, 1 / seconds_per_byte)


def _fastest_trip_s(network: Communicator, nbytes: int) -> float:
    payload = torch.ones(nbytes, dtype=torch.uint8)
    return min(_trip_s(network, payload) for _ in range(TRIPS))


def _trip_s(network: Communicator, payload: torch.Tensor) -> float:
    started_at = network.clock.now()
    network.send(1, Message(Kind.VECTOR, payload))
    network.receive(1)
    return network.clock.now() - started_at
