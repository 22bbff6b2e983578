"""The simulated communicator, and all ranks of a simulated run together (`SimulatedCluster`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import one_by_one
from polyrhythm.communication.collective import add_up_whole
from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.communicator import Communicator, Handle, LentMemory, NoSharedMemory, Traffic
from polyrhythm.communication.message import HEADER_BYTES, Kind, Message
from polyrhythm.communication.transports.inbox import Want
from polyrhythm.communication.transports.member_collectives import REVOKED, CollectiveBroken, ranks_to_notify
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork
from polyrhythm.communication.transports.simulated.network import Network
from polyrhythm.communication.transports.simulated.rank import (
    Courier,
    FollowingParcel,
    Parcel,
    SimulatedRank,
    report_loss,
)
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime
from polyrhythm.cost.all_reduce import travels_whole
from polyrhythm.errors import PeerLost


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of a communicator: one object for all of them, since thousands of ranks have thousands of members.

    Attributes:
        name: identifier among groups of the same ranks.
        members: global ranks, in the order in which the group numbers them.
        context: context of its messages.
        numbers: numbers of the members in the group, by global rank.
    """

    name: str
    members: tuple[int, ...]
    context: int
    numbers: dict[int, int]


class TaskHandle(Handle):
    """A task in progress in virtual time."""

    def __init__(self, time: VirtualTime, task: Task) -> None:
        self._time = time
        self._task = task

    def done(self) -> bool:
        return self._task.ended

    def wait(self) -> Any:
        """Park until the task has ended; return its result."""
        return self._time.join(self._task)


_IN_SLICES = Direct()
_PART, _PUSH = Kind.PART, Kind.PUSH  # an enum is slow to ask for its members
_LOOK_EVERY_S = 1e-4
_Waited = tuple[int | None, int, Want, str]
"""Criteria of a receive: source and tag as given, their resolution, and a description in words."""


class SimulatedCommunicator(Communicator):
    """One rank's end of a group of simulated ranks; see `Communicator`.

    Attributes:
        traffic: bytes sent by the rank.
    """

    # As of the ranks: what a step touches is then in fewer lines of memory.
    __slots__ = (
        "_cluster",
        "_collective_space",
        "_collectives",
        "_context",
        "_generations",
        "_group",
        "_has_revoked",
        "_home",
        "_lineage",
        "_members",
        "_numbers",
        "_passed_kind",
        "_passed_nbytes",
        "_passed_on",
        "_start_in_turn",
        "_waited",
        "clock",
        "rank",
        "size",
        "traffic",
    )

    def __init__(
        self,
        cluster: SimulatedCluster,
        home: SimulatedRank,
        group: Group,
        lineage: tuple[int, ...] = (),
        generations: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._cluster = cluster
        self._home = home
        self.traffic: Traffic = home
        self._group = group
        self._lineage = lineage
        self._has_revoked = False
        self._generations = generations
        if generations:
            home.inbox.know_losses(group.context, generations)
        self._members = group.members
        self._context = group.context
        self._numbers = group.numbers
        self.rank = self._numbers[home.rank]
        self.size = len(group.members)
        self.clock = cluster.time
        self._collective_space: SimulatedCommunicator | None = None
        self._waited: _Waited | None = None
        self._passed_on: Tensor | None = None  # the payload that was last handed on as it was
        self._passed_kind: Kind | None = None
        self._passed_nbytes = 0
        self._collectives = 0
        self._start_in_turn = one_by_one()

    def send(self, to: int, message: Message) -> None:
        self.start_send(to, message).wait()

    def start_send(self, to: int, message: Message) -> Parcel:
        """Start to send; what arrives is what the tensor holds now."""
        home, member, cluster = self._home, self._members[to], self._cluster
        receiver = home.peers.get(member)
        if receiver is None or not home.inbox.quiet:
            if home.inbox.is_revoked(self._lineage) and message.kind is not Kind.REVOKE:
                raise CollectiveBroken(REVOKED)
            receiver = home.peer(self._context, member)
        # Dry runs hand the same payload on in every step; its size is not worth a second look.
        if message[1] is self._passed_on and message[0] is self._passed_kind:
            # The same size as the last time.
            nbytes, arriving = self._passed_nbytes, message
        else:
            nbytes, arriving = self._weigh(message)
        home.bytes_sent += nbytes
        if member in home.beside:
            home.bytes_inside += nbytes
        parcel: Parcel
        if home.lines or message[0] is _PUSH or message[0] is _PART:
            follows = receiver in home.lines
            before = home.lines[receiver] if follows else None
            parcel = FollowingParcel(home, receiver, self._context, arriving, nbytes, self._put_on_links)
            if before is not None:
                before.following = parcel
                return parcel
        else:
            parcel = Parcel(home, receiver, self._context, arriving, nbytes)
        contended = cluster.contended
        if contended is None or cluster.courier is not None:
            self._put_on_links(parcel)
        else:  # as `_put_on_links` does
            contended.start(parcel, home.rank, member)
        return parcel

    def _put_on_links(self, parcel: Parcel) -> None:
        cluster, source, to = self._cluster, parcel.source.rank, parcel.to.rank
        if cluster.courier is not None:
            cluster.courier.carry(parcel)
        elif cluster.contended is None:
            cluster.network.transfer(source, to, parcel.nbytes, parcel.sent, parcel.arrive)
        else:
            cluster.contended.start(parcel, source, to)

    def _weigh(self, message: Message) -> tuple[int, Message]:
        """Return the bytes of a message on the links, and what arrives of it."""
        nbytes, arriving = self._cluster.nbytes_of(message), self._cluster.received(message)
        if arriving is message:
            self._passed_kind, self._passed_on, self._passed_nbytes = message.kind, message.tensor, nbytes
        return nbytes, arriving

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        waited = self._waited
        if waited is None or waited[0] != source or waited[1] != tag:  # most receive the same again
            waited = self._wait_for(source, tag)
        global_source, message = self._home.take(waited[2], waited[3])
        return self._numbers[global_source], message

    def receive_into(self, target: Tensor, source: int, tag: int = 0) -> Message:
        return self.receive(source, tag)[1]

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        found = self._home.take_now(self._wait_for(source, tag)[2])
        return None if found is None else (self._numbers[found[0]], found[1])

    def start(self, work: Callable[[], Any]) -> Handle:
        name = f"rank {self._home.rank}'s background work"
        return TaskHandle(self.clock, self.clock.spawn(name, work, awaited=True, owner=self._home))

    def all_reduce(self, tensor: Tensor) -> None:
        self._apart()._add_up(tensor, self._next_tag())

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Start to add up over all ranks, after those that were started before it: gloo, too, does one at a time."""
        apart, tag = self._apart(), self._next_tag()
        return self._start_in_turn(self.start, lambda: apart._add_up(tensor, tag))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        tensor, apart, tag = tensor.detach(), self._apart(), self._next_tag()
        if self.rank == root:
            for to in range(self.size):
                if to != root:
                    apart.send(to, Message(Kind.VECTOR, tensor.reshape(-1), tag=tag))
        else:
            _, message = apart.receive(root, tag)
            assert message.tensor is not None
            tensor.copy_(message.tensor.view_as(tensor))

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(self.size))

    def revoke(self) -> None:
        if not self._has_revoked:
            self._has_revoked = True
            for to in ranks_to_notify(self.rank, self.size):
                with suppress(PeerLost):
                    self.start_send(to, Message(Kind.REVOKE))
        self.revoke_here()

    def revoke_here(self) -> None:
        self._home.revoke(self._context)

    def revoke_without(self, rank: int) -> None:
        member = self._members[rank]
        self._home.inbox.need(self._context, member, self._generations.get(member, 0))
        self._home.revoke_useless()

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        cluster, home, first = self._cluster, self._home, self._members[0]
        hosts = {cluster.host_of[member] for member in self._members} if cluster.host_of else {0}
        if len(hosts) > 1:
            raise NoSharedMemory(f"they are on {len(hosts)} hosts")
        key = f"{self._group.name}#{name}", self._members
        if home.rank == first and not later:
            cluster.shared_vectors[key] = like.detach().clone().reshape(-1), [home]
        # Memory is gone with the last process that has it.
        while (found := cluster.shared_vectors.get(key)) is None or not any(each.alive for each in found[1]):
            if home.rank == first or home.inbox.is_lost(first):
                raise PeerLost(first, "looking for the vector that all workers share")
            self.clock.sleep(_LOOK_EVERY_S)
        vector, holders = found
        holders.append(home)
        return vector

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """No memory is better than another here."""
        return None

    def lent_memory(self) -> LentMemory | None:
        """Messages are not copied anyway."""
        return None

    def regrouped(self, name: str, ranks: Sequence[int], generations: Sequence[int]) -> SimulatedCommunicator:
        known = {self._members[rank]: number for rank, number in zip(ranks, generations, strict=True)}
        for rank, generation in known.items():
            self._home.expect(rank, generation)
        return self._subgroup(name, ranks, known)

    @property
    def context(self) -> int:
        """The number of its message space, the same on all its ranks."""
        return self._context

    def subgroup(self, name: str, ranks: Sequence[int]) -> SimulatedCommunicator:
        return self._subgroup(name, ranks, self._generations)

    def _subgroup(
        self, name: str, ranks: Sequence[int], generations: Mapping[int, int]
    ) -> SimulatedCommunicator:
        cluster = self._cluster
        members = cluster.globally(self._group, ranks)
        group = cluster.group(f"{self._group.name}/{name}", members)
        lineage = (*self._lineage, group.context)
        return SimulatedCommunicator(cluster, self._home, group, lineage, generations)

    def _wait_for(self, source: int | None, tag: int) -> _Waited:
        """Return the description of a receiver's wait; the previous one if it is equal."""
        waited = self._waited
        if waited is None or waited[0] != source or waited[1] != tag:
            sender = "anyone" if source is None else f"rank {self._members[source]}"
            global_source = None if source is None else self._members[source]
            want = Want(self._context, global_source, tag, self._members, self._lineage)
            waited = self._waited = source, tag, want, f"a message from {sender}"
        return waited

    def _add_up(self, tensor: Tensor, tag: int) -> None:
        """Add a tensor up over all ranks, whole or in slices as real ranks do over their links."""
        if self.size == 1:
            return
        if not self._home.inbox.quiet:  # with a member that is known to be lost, real ranks send nothing
            for member in self._members:
                if member != self._home.rank:
                    self._home.peer(self._context, member)
        nbytes = self._cluster.nbytes_of(Message(Kind.VECTOR, tensor)) - HEADER_BYTES
        if travels_whole(nbytes, self.size):
            add_up_whole(self, tensor, tag)
        else:
            _IN_SLICES.all_reduce(self, tensor, tag)

    def _apart(self) -> SimulatedCommunicator:
        """Return the message space of collectives, which number their messages' tags themselves."""
        if self._collective_space is None:
            group = self._cluster.group(f"{self._group.name}#collectives", self._members)
            self._collective_space = SimulatedCommunicator(
                self._cluster, self._home, group, self._lineage, self._generations
            )
        return self._collective_space

    def _next_tag(self) -> int:
        self._collectives += 1
        return self._collectives


class SimulatedCluster:
    """All ranks of a simulated run.

    Attributes:
        time: the virtual time.
        network: the links.
        contended: links that flows share fairly, if any; they accept messages directly.
        courier: courier of messages over them; None: messages start at once and arrive unchanged.
        nbytes_of: function that returns the bytes of a message on the links.
        received: function that returns what arrives of a message.
        ranks: one entry a rank: the latest under its number.
        host_of: the number of each rank's host; empty if all are on one.
        shared_vectors: memory that ranks share, and those that have had it, by name and ranks.
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
        self.contended = network if isinstance(network, ContendedNetwork) else None
        self.courier: Courier | None = None
        self.host_of: tuple[int, ...] = ()
        self.shared_vectors: dict[tuple[str, tuple[int, ...]], tuple[Tensor, list[SimulatedRank]]] = {}
        self.nbytes_of = nbytes_of
        self.received: Callable[[Message], Message] = Message.received
        self.ranks = [SimulatedRank(self, rank) for rank in range(size)]
        self._everyone = tuple(range(size))
        self._groups: dict[str, Group] = {}

    def place(self, host_of: tuple[int, ...]) -> None:
        """Put the ranks on hosts, given by their numbers."""
        self.host_of = host_of
        for rank in self.ranks:
            rank.beside = self._beside(rank.rank)

    def _beside(self, rank: int) -> frozenset[int]:
        hosts = self.host_of
        found = frozenset(other for other, host in enumerate(hosts) if host == hosts[rank])
        return found if 1 < len(found) < len(hosts) else frozenset()

    def communicator(self, rank: int) -> SimulatedCommunicator:
        """Return a rank's communicator over all ranks."""
        return SimulatedCommunicator(self, self.ranks[rank], self.group("all", self._everyone))

    def group(self, name: str, members: tuple[int, ...]) -> Group:
        """Return the group of these ranks that goes by this name."""
        found = self._groups.get(name)
        if found is None or not (found.members is members or found.members == members):
            numbers = {member: number for number, member in enumerate(members)}
            context = crc32(f"{name}{members}".encode())
            found = self._groups[name] = Group(name, members, context, numbers)
        return found

    def globally(self, group: Group, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the global ranks of some ranks of a group; at once where that is all of it, or it is everyone."""
        if ranks == range(len(group.members)):
            return group.members
        if group.members is self._everyone:
            return tuple(ranks)
        return tuple(group.members[rank] for rank in ranks)

    def lose(self, rank: int) -> None:
        """Notify all other ranks of the loss of one."""
        for other in self.ranks:
            if other.rank != rank:
                other.note_loss(self.ranks[rank])

    def kill(self, rank: int) -> None:
        """End a rank with all its tasks, as the loss of its process does; called by queued actions, never by tasks.

        What has left arrives. What is leaving is cut: it takes its time on the links, and does not arrive. The others
        hear of the loss one latency later, as they do over TCP.
        """
        victim = self.ranks[rank]
        victim.alive = False
        self.time.kill(victim)
        for other in self.ranks:
            if other.alive:
                if self.courier is None:
                    report_loss(self.network, victim, other)
                else:
                    self.courier.report_loss(victim, other)

    def replace(self, rank: int) -> None:
        """Give a killed rank a replacement with new links."""
        successor = SimulatedRank(self, rank, self.ranks[rank].generation + 1)
        self.ranks[rank] = successor
        successor.beside = self._beside(rank)
        successor.met = {other.rank: other.generation for other in self.ranks}
        for other in self.ranks:
            if not other.alive:
                successor.note_loss(other)
