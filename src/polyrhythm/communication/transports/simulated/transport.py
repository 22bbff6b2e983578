"""All ranks of a simulated run, and their communicators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from polyrhythm.communication.message import Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCommunicator
from polyrhythm.communication.transports.simulated.courier import Courier, tell_loss
from polyrhythm.communication.transports.simulated.group import Group
from polyrhythm.communication.transports.simulated.network import Network
from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.shared_vector import SharedVector
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


class SimulatedCluster:
    """All ranks of a simulated run.

    Attributes:
        time: the virtual time.
        network: the links.
        courier: takes messages over them; None: they start at once, and nothing happens to them.
        nbytes_of: gives the bytes of a message on the links.
        received: gives what arrives of a message.
        ranks: one entry a rank: the latest under its number.
        host_of: the number of each rank's host; empty if all are on one.
        shared_vectors: memory that ranks share, by name and ranks.
    """

    def __init__(
        self,
        time: VirtualTime,
        network: Network,
        size: int,
        nbytes_of: Callable[[Message], int] = attrgetter("nbytes"),
    ) -> None:
        self.time = time
        self.network = network
        self.courier: Courier | None = None
        self.host_of: tuple[int, ...] = ()
        self.shared_vectors: dict[tuple[str, tuple[int, ...]], SharedVector] = {}
        self.nbytes_of = nbytes_of
        self.received: Callable[[Message], Message] = Message.received
        self.ranks = [SimulatedRank(self, rank) for rank in range(size)]
        self._everyone = tuple(range(size))
        self._groups: dict[str, Group] = {}

    def communicator(self, rank: int) -> SimulatedCommunicator:
        """Gives a rank's communicator over all ranks."""
        return SimulatedCommunicator(self, self.ranks[rank], self.group("all", self._everyone))

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Gives the group of these ranks that goes by this name."""
        found = self._groups.get(name)
        if found is None or not (found.members is members or found.members == members):
            found = self._groups[name] = Group.of(name, members)
        return found

    def globally(self, group: Group, ranks: Sequence[int]) -> tuple[int, ...]:
        """Gives the global ranks of some ranks of a group; at once where that is all of it, or it is everyone."""
        if ranks == range(len(group.members)):
            return group.members
        if group.members is self._everyone:
            return tuple(ranks)
        return tuple(group.members[rank] for rank in ranks)

    def lose(self, rank: int) -> None:
        """Tells all other ranks that one is gone."""
        for other in self.ranks:
            if other.rank != rank:
                other.hear_of_loss(self.ranks[rank])

    def kill(self, rank: int) -> None:
        """Ends a rank with all its tasks, as the loss of its process does; called by queued actions, never by tasks.

        What has left arrives. What is leaving is cut: it takes its time on the links, and does not arrive. The others
        hear of the loss one latency later, as they do over TCP.
        """
        victim = self.ranks[rank]
        victim.alive = False
        self.time.kill(victim)
        for other in self.ranks:
            if other.alive:
                if self.courier is None:
                    tell_loss(self.network, victim, other)
                else:
                    self.courier.tell_loss(victim, other)

    def replace(self, rank: int) -> None:
        """Gives a killed rank a successor, whose links are new."""
        successor = SimulatedRank(self, rank, self.ranks[rank].incarnation + 1)
        self.ranks[rank] = successor
        successor.met = {other.rank: other.incarnation for other in self.ranks}
        for other in self.ranks:
            if not other.alive:
                successor.hear_of_loss(other)
