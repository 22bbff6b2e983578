"""Simulated links: when a message that starts now has left, and when it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


class Network(Protocol):
    """Moves bytes between ranks in virtual time."""

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        """Start a transfer now.

        Args:
            source: global rank of the sender.
            to: global rank of the receiver.
            nbytes: size of the message.
            sent: callback, called when the sender's buffer is free again.
            arrived: callback, called when the last byte has arrived.
        """

    def alpha_s(self, source: int, to: int) -> float:
        """Return α of the way from one global rank to another."""


Action = Callable[[], None]


@dataclass
class ConstantNetwork(Network):
    """Every link has the same latency and bandwidth; a rank sends one message at a time, full duplex.

    A message of M bytes that starts at t has left at t + M/bandwidth and is there `latency_s` later.

    Attributes:
        time: the simulation's.
        latency_s: α, seconds a message.
        bandwidth_bytes_per_s: 1/β.
    """

    time: VirtualTime
    latency_s: float = 50e-6
    bandwidth_bytes_per_s: float = 1e9
    _free_at: dict[int, float] = field(default_factory=dict)

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        start = max(self.time.now(), self._free_at.get(source, 0.0))
        left = start + nbytes / self.bandwidth_bytes_per_s
        self._free_at[source] = left
        self.time.at(left, sent)
        self.time.at(left + self.latency_s, arrived)

    def alpha_s(self, source: int, to: int) -> float:
        return self.latency_s
