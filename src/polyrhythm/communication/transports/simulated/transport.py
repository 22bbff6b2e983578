"""The simulated communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from polyrhythm.communication.collectives.direct import Direct
from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.inbox import Inbox, Want
from polyrhythm.communication.transports.simulated.network import Network
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime
from polyrhythm.errors import PeerLost

_COLLECTIVE = Direct()


class SimulatedRank:
    """What one rank has, whichever of its communicators is used: an inbox, and tasks parked on it.

    A rank that was killed may have a successor: another such object under the same number. Links are between objects,
    so nothing that is meant for the one reaches the other.

    Attributes:
        incarnation: how many came before it under this number.
        alive: whether it has not been killed.
        bytes_sent: by this rank, through all its communicators.
    """

    def __init__(self, cluster: SimulatedCluster, rank: int, incarnation: int = 0) -> None:
        self.cluster = cluster
        self.rank = rank
        self.incarnation = incarnation
        self.alive = True
        self.bytes_sent = 0
        self.inbox = Inbox()
        self._parked: list[tuple[Want, Task]] = []
        self._peers: dict[int, SimulatedRank] = {}
        self._broken: set[SimulatedRank] = set()

    def peer(self, context: int, rank: int) -> SimulatedRank:
        """Gives the other end of the link to a rank.

        Raises:
            PeerLost: as far as this rank knows it is gone, or nobody is there to open a link to.
        """
        if self.inbox.is_lost_to(context, rank):
            raise PeerLost(rank, "sending to it")
        found = self._peers.get(rank)
        if found is None:
            found = self.cluster.ranks[rank]
            if not found.alive:
                raise PeerLost(rank, "opening a link to it")
            self._peers[rank] = found
        return found

    def deliver(self, context: int, source: SimulatedRank, message: Message) -> None:
        """Puts a message into the inbox and wakes who waits for it; a broken link brings nothing."""
        if self.alive and self.hears(source):
            self._put(context, source.rank, message)

    def hears(self, source: SimulatedRank) -> bool:
        """Whether there is a link from this rank; a successor's first message opens one."""
        known = self._peers.setdefault(source.rank, source)
        if known is source:
            return source not in self._broken
        if known.incarnation > source.incarnation:
            return False
        self._peers[source.rank] = source
        self.inbox.regain(source.rank)
        self._look_again()
        return True

    def _put(self, context: int, source: int, message: Message) -> None:
        self.inbox.put(context, source, message)
        for entry in self._parked:
            want, task = entry
            if want.context == context and want.tag == message.tag and want.source in (None, source):
                self._parked.remove(entry)
                self.cluster.time.wake(task)
                return

    def hear_of_loss(self, gone: SimulatedRank) -> None:
        """Notes that a peer is gone, unless its successor has been heard already."""
        if self.alive and self._peers.setdefault(gone.rank, gone) is gone:
            self.inbox.lose(gone.rank)
            self._look_again()

    def break_link(self, peer: SimulatedRank) -> None:
        """Breaks the link with a peer, which may live: nothing more comes from it."""
        self._broken.add(peer)
        self.hear_of_loss(peer)

    def _look_again(self) -> None:
        """Lets all parked tasks look whether what they wait for can still come."""
        parked, self._parked = self._parked, []
        for _, task in parked:
            self.cluster.time.wake_soon(task)

    def take(self, want: Want, reason: str) -> tuple[int, Message]:
        """Receives, parking the running task until the message is there."""
        while True:
            found = self.inbox.take(want)
            if found is not None:
                return found
            self._tell_loss(want, reason)
            self._parked.append((want, self.cluster.time.running()))
            self.cluster.time.park(reason)

    def take_now(self, want: Want) -> tuple[int, Message] | None:
        """Receives if the message is there."""
        found = self.inbox.take(want)
        if found is None:
            self._tell_loss(want, "looking for a message")
        return found

    def _tell_loss(self, want: Want, reason: str) -> None:
        lost = self.inbox.news_of_loss(want)
        if lost is not None:
            raise PeerLost(lost, reason)


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of a communicator: one object for all of them, since thousands of ranks have thousands of members.

    Attributes:
        name: tells its messages from those of other groups of the same ranks.
        members: global ranks, in the order in which the group numbers them.
        context: of its messages.
        numbers: of the members in the group, by global rank.
    """

    name: str
    members: tuple[int, ...]
    context: int
    numbers: dict[int, int]

    @classmethod
    def of(cls, name: str, members: tuple[int, ...]) -> Group:
        """Makes a group."""
        numbers = {member: number for number, member in enumerate(members)}
        return cls(name, members, crc32(f"{name}{members}".encode()), numbers)


class Courier(Protocol):
    """Takes messages over the links."""

    def carry(self, parcel: Parcel) -> None:
        """Starts now: calls the parcel's `sent` when it has left, and `arrive` when it is there."""

    def tell_loss(self, gone: SimulatedRank, to: SimulatedRank) -> None:
        """Lets a rank hear that another is gone, after all that had left it."""


@dataclass
class PlainCourier:
    """Loses nothing and changes nothing.

    Attributes:
        network: the links.
    """

    network: Network

    def carry(self, parcel: Parcel) -> None:
        """Starts now; see `Courier`."""
        self.network.transfer(parcel.source.rank, parcel.to.rank, parcel.nbytes, parcel.sent, parcel.arrive)

    def tell_loss(self, gone: SimulatedRank, to: SimulatedRank) -> None:
        """Tells it one latency later, as the end of a TCP connection takes."""
        heard_at_s = gone.cluster.time.now() + self.network.alpha_s(gone.rank, to.rank)
        gone.cluster.time.at(heard_at_s, partial(to.hear_of_loss, gone))


class SimulatedCluster:
    """All ranks of a simulated run.

    Attributes:
        time: the virtual time.
        network: the links.
        courier: takes messages over them.
        nbytes_of: gives the bytes of a message on the links.
        ranks: one entry a rank: the latest under its number.
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
        self.courier: Courier = PlainCourier(network)
        self.nbytes_of = nbytes_of
        self.ranks = [SimulatedRank(self, rank) for rank in range(size)]
        self._everyone = tuple(range(size))
        self._groups: dict[str, Group] = {}

    def communicator(self, rank: int) -> SimulatedCommunicator:
        """Gives a rank's communicator over all ranks."""
        return SimulatedCommunicator(self.ranks[rank], self.group("all", self._everyone))

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
                self.courier.tell_loss(victim, other)

    def replace(self, rank: int) -> None:
        """Gives a killed rank a successor, whose links are new."""
        successor = SimulatedRank(self, rank, self.ranks[rank].incarnation + 1)
        self.ranks[rank] = successor
        for other in self.ranks:
            if not other.alive:
                successor.hear_of_loss(other)


class TaskHandle:
    """A task under way in virtual time."""

    def __init__(self, time: VirtualTime, task: Task) -> None:
        self._time = time
        self._task = task

    def done(self) -> bool:
        """Whether the task has ended."""
        return self._task.ended

    def wait(self) -> Any:
        """Parks until the task has ended; gives its result."""
        return self._time.join(self._task)


class Parcel:
    """A message on its way, and its sender's handle on it.

    Attributes:
        source: its sender.
        to: its receiver.
        context: of the communicator.
        message: what arrives.
        nbytes: on the links.
    """

    __slots__ = ("_left", "_waiter", "context", "message", "nbytes", "source", "to")

    def __init__(
        self, source: SimulatedRank, to: SimulatedRank, context: int, message: Message, nbytes: int
    ) -> None:
        self.source = source
        self.to = to
        self.context = context
        self.message = message
        self.nbytes = nbytes
        self._left = False
        self._waiter: Task | None = None

    def sent(self) -> None:
        """Called when the message has left; that of a sender killed meanwhile never does."""
        if not self.source.alive:
            return
        self._left = True
        if self._waiter is not None:
            self.source.cluster.time.wake(self._waiter)

    def arrive(self) -> None:
        """Called when the last byte is there, if it has left."""
        if self._left:
            self.to.deliver(self.context, self.source, self.message)

    def done(self) -> bool:
        """Whether the message has left."""
        return self._left

    def wait(self) -> None:
        """Parks until the message has left."""
        if not self._left:
            time = self.source.cluster.time
            self._waiter = time.running()
            time.park("a message to leave")


class SimulatedCommunicator:
    """One rank's end of a group of simulated ranks; see `Communicator`."""

    def __init__(self, home: SimulatedRank, group: Group) -> None:
        self._home = home
        self._group = group
        self._members = group.members
        self._context = group.context
        self._numbers = group.numbers
        self._rank = self._numbers[home.rank]
        self._collective_space: SimulatedCommunicator | None = None
        self._waited: tuple[int | None, int, Want, str] | None = None
        self._collectives = 0

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
        return self._home.cluster.time

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the simulation began."""
        return self._home.bytes_sent

    def send(self, to: int, message: Message) -> None:
        """Sends; returns when the message has left."""
        self.start_send(to, message).wait()

    def start_send(self, to: int, message: Message) -> Parcel:
        """Starts to send; what arrives is what the tensor holds now."""
        home, cluster = self._home, self._home.cluster
        receiver = home.peer(self._context, self._members[to])
        parcel = Parcel(home, receiver, self._context, message.received(), cluster.nbytes_of(message))
        home.bytes_sent += parcel.nbytes
        cluster.courier.carry(parcel)
        return parcel

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        want, reason = self._wait_for(source, tag)
        global_source, message = self._home.take(want, reason)
        return self._numbers[global_source], message

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Takes a message if one is there."""
        found = self._home.take_now(self._wait_for(source, tag)[0])
        return None if found is None else (self._numbers[found[0]], found[1])

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` as a task of its own."""
        name = f"rank {self._home.rank}'s background work"
        return TaskHandle(self.clock, self.clock.spawn(name, work, awaited=True, owner=self._home))

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all ranks, message by message."""
        _COLLECTIVE.all_reduce(self._apart(), tensor, self._next_tag())

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to add up over all ranks."""
        apart, tag = self._apart(), self._next_tag()
        return self.start(lambda: _COLLECTIVE.all_reduce(apart, tensor, tag))

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

    def subgroup(self, name: str, ranks: Sequence[int]) -> SimulatedCommunicator:
        """Makes the communicator of some of these ranks."""
        cluster = self._home.cluster
        members = cluster.globally(self._group, ranks)
        return SimulatedCommunicator(self._home, cluster.group(f"{self._group.name}/{name}", members))

    def _wait_for(self, source: int | None, tag: int) -> tuple[Want, str]:
        """Gives what a receiver waits for, and in words; that of the last time, since most receive the same again."""
        if self._waited is None or self._waited[:2] != (source, tag):
            who = "anyone" if source is None else f"rank {self._members[source]}"
            want = Want(self._context, None if source is None else self._members[source], tag, self._members)
            self._waited = (source, tag, want, f"a message from {who}")
        return self._waited[2:]

    def _apart(self) -> SimulatedCommunicator:
        """Gives the message space of collectives, which number their messages' tags themselves."""
        if self._collective_space is None:
            group = self._home.cluster.group(f"{self._group.name}#collectives", self._members)
            self._collective_space = SimulatedCommunicator(self._home, group)
        return self._collective_space

    def _next_tag(self) -> int:
        self._collectives += 1
        return self._collectives
