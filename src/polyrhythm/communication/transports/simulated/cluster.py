"""What a simulated rank's communicator asks of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.simulated.courier import Courier
from polyrhythm.communication.transports.simulated.group import Group
from polyrhythm.communication.transports.simulated.network import Network
from polyrhythm.communication.transports.simulated.shared_vector import SharedVector
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


class Cluster(Protocol):
    """All ranks of a simulated run; see `SimulatedCluster`."""

    time: VirtualTime
    network: Network
    courier: Courier | None
    host_of: tuple[int, ...]
    shared_vectors: dict[tuple[str, tuple[int, ...]], SharedVector]
    nbytes_of: Callable[[Message], int]
    received: Callable[[Message], Message]

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Gives the group of these ranks that goes by this name."""

    def globally(self, group: Group, ranks: Sequence[int]) -> tuple[int, ...]:
        """Gives the global ranks of some ranks of a group."""
