"""The simulated communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.in_turn import InTurn
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.no_shared_memory import NoSharedMemory
from polyrhythm.communication.transports.collective_broken import REVOKED, CollectiveBroken, revoke_tells
from polyrhythm.communication.transports.inbox import Want
from polyrhythm.communication.transports.simulated.cluster import Cluster
from polyrhythm.communication.transports.simulated.courier import Parcel
from polyrhythm.communication.transports.simulated.group import Group
from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.shared_vector import SharedVector
from polyrhythm.communication.transports.simulated.task_handle import TaskHandle
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost

_COLLECTIVE = Direct()
_LOOK_EVERY_S = 1e-4
_Waited = tuple[int | None, int, Want, str]
"""What a receiver waits for: source and tag as it named them, what that means, and in words."""


class SimulatedCommunicator:
    """One rank's end of a group of simulated ranks; see `Communicator`."""

    def __init__(
        self, cluster: Cluster, home: SimulatedRank, group: Group, lineage: tuple[int, ...] = ()
    ) -> None:
        self._cluster = cluster
        self._home = home
        self._group = group
        self._lineage = lineage
        self._has_revoked = False
        self._incarnations: Mapping[int, int] = {}
        self._members = group.members
        self._context = group.context
        self._numbers = group.numbers
        self._rank = self._numbers[home.rank]
        self._collective_space: SimulatedCommunicator | None = None
        self._waited: _Waited | None = None
        self._handed_on: Tensor | None = None  # the payload that was last handed on as it was
        self._handed_kind: Kind | None = None
        self._handed_nbytes = 0
        self._collectives = 0
        self._turns = InTurn()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._members)

    @property
    def clock(self) -> VirtualTime:
        """The simulation's clock."""
        return self._cluster.time

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the simulation began."""
        return self._home.bytes_sent

    def send(self, to: int, message: Message) -> None:
        """Sends; returns when the message has left."""
        self.start_send(to, message).wait()

    def start_send(self, to: int, message: Message) -> Parcel:
        """Starts to send; what arrives is what the tensor holds now."""
        home, member, cluster = self._home, self._members[to], self._cluster
        receiver = home.peers.get(member)
        if receiver is None or not home.inbox.quiet:
            if home.inbox.is_revoked(self._lineage) and message.kind is not Kind.REVOKE:
                raise CollectiveBroken(REVOKED)
            receiver = home.peer(self._context, member)
        if message[1] is self._handed_on and message[0] is self._handed_kind:
            # Of the same size as the last time.
            nbytes, arriving = self._handed_nbytes, message
        else:
            nbytes, arriving = self._weigh(message)
        home.bytes_sent += nbytes
        parcel = Parcel(home, receiver, self._context, arriving, nbytes)
        if cluster.courier is None:
            cluster.network.transfer(home.rank, member, nbytes, parcel.sent, parcel.arrive)
        else:
            cluster.courier.carry(parcel)
        return parcel

    def _weigh(self, message: Message) -> tuple[int, Message]:
        """Gives the bytes of a message on the links, and what arrives of it."""
        nbytes, arriving = self._cluster.nbytes_of(message), self._cluster.received(message)
        if arriving is message:
            self._handed_kind, self._handed_on, self._handed_nbytes = message.kind, message.tensor, nbytes
        return nbytes, arriving

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        waited = self._waited
        if waited is None or waited[0] != source or waited[1] != tag:  # most receive the same again
            waited = self._wait_for(source, tag)
        global_source, message = self._home.take(waited[2], waited[3])
        return self._numbers[global_source], message

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Takes a message if one is there."""
        found = self._home.take_now(self._wait_for(source, tag)[2])
        return None if found is None else (self._numbers[found[0]], found[1])

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` as a task of its own."""
        name = f"rank {self._home.rank}'s background work"
        return TaskHandle(self.clock, self.clock.spawn(name, work, awaited=True, owner=self._home))

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all ranks, message by message."""
        _COLLECTIVE.all_reduce(self._apart(), tensor, self._next_tag())

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to add up over all ranks, after those that were started before it: gloo, too, does one at a time."""
        apart, tag = self._apart(), self._next_tag()
        return self._turns.start(self.start, lambda: _COLLECTIVE.all_reduce(apart, tensor, tag))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` with `root`'s."""
        tensor, apart, tag = tensor.detach(), self._apart(), self._next_tag()
        if self._rank == root:
            for to in range(self.size):
                if to != root:
                    apart.send(to, Message(Kind.VECTOR, tensor.reshape(-1), tag=tag))
        else:
            _, message = apart.receive(root, tag)
            assert message.tensor is not None
            tensor.copy_(message.tensor.view_as(tensor))

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.all_reduce(torch.zeros(self.size))

    def revoke(self) -> None:
        """Ends the use of this communicator."""
        if not self._has_revoked:
            self._has_revoked = True
            for to in revoke_tells(self._rank, self.size):
                with suppress(PeerLost):
                    self.start_send(to, Message(Kind.REVOKE))
        self.revoke_here()

    def revoke_here(self) -> None:
        """Ends the use of this communicator on this rank alone."""
        self._home.revoke(self._context)

    def revoke_without(self, rank: int) -> None:
        """Ends the use of this communicator on this rank once another is lost."""
        member = self._members[rank]
        self._home.inbox.need(self._context, member, self._incarnations.get(member, 0))
        self._home.revoke_useless()

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        """Gives a vector that all ranks read and write; it is there as soon as rank 0 is."""
        cluster, home, first = self._cluster, self._home, self._members[0]
        hosts = {cluster.host_of[member] for member in self._members} if cluster.host_of else {0}
        if len(hosts) > 1:
            raise NoSharedMemory(f"they are on {len(hosts)} hosts")
        key = f"{self._group.name}#{name}", self._members
        if home.rank == first and not later:
            cluster.shared_vectors[key] = SharedVector(like.detach().clone().reshape(-1), [home])
        while (found := cluster.shared_vectors.get(key)) is None or not found.is_there:
            if home.rank == first or home.inbox.is_lost(first):
                raise PeerLost(first, "looking for the vector that all workers share")
            self.clock.sleep(_LOOK_EVERY_S)
        found.holders.append(home)
        return found.vector

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """No memory is better than another here."""
        return None

    def regrouped(
        self, name: str, ranks: Sequence[int], incarnations: Sequence[int]
    ) -> SimulatedCommunicator:
        """Makes the communicator of some of these ranks, as they are now."""
        known = {self._members[rank]: number for rank, number in zip(ranks, incarnations, strict=True)}
        for rank, incarnation in known.items():
            self._home.expect(rank, incarnation)
        made = self.subgroup(name, ranks)
        made._know(known)
        made._apart()._know(known)
        return made

    def _know(self, incarnations: Mapping[int, int]) -> None:
        self._incarnations = incarnations
        self._home.inbox.know_losses(self._context, incarnations)

    @property
    def context(self) -> int:
        """The number of its message space, the same on all its ranks."""
        return self._context

    def subgroup(self, name: str, ranks: Sequence[int]) -> SimulatedCommunicator:
        """Makes the communicator of some of these ranks."""
        cluster = self._cluster
        members = cluster.globally(self._group, ranks)
        group = cluster.group(f"{self._group.name}/{name}", members)
        made = SimulatedCommunicator(self._cluster, self._home, group, (*self._lineage, group.context))
        if self._incarnations:
            made._know(self._incarnations)
            made._apart()._know(self._incarnations)
        return made

    def _wait_for(self, source: int | None, tag: int) -> _Waited:
        """Gives what a receiver waits for: that of the last time if it is the same."""
        waited = self._waited
        if waited is None or waited[0] != source or waited[1] != tag:
            who = "anyone" if source is None else f"rank {self._members[source]}"
            global_source = None if source is None else self._members[source]
            want = Want(self._context, global_source, tag, self._members, self._lineage)
            waited = self._waited = source, tag, want, f"a message from {who}"
        return waited

    def _apart(self) -> SimulatedCommunicator:
        """Gives the message space of collectives, which number their messages' tags themselves."""
        if self._collective_space is None:
            group = self._cluster.group(f"{self._group.name}#collectives", self._members)
            self._collective_space = SimulatedCommunicator(self._cluster, self._home, group, self._lineage)
        return self._collective_space

    def _next_tag(self) -> int:
        self._collectives += 1
        return self._collectives
