"""The simulated communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
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

    Attributes:
        bytes_sent: by this rank, through all its communicators.
    """

    def __init__(self, cluster: SimulatedCluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.bytes_sent = 0
        self.inbox = Inbox()
        self._parked: list[tuple[Want, Task]] = []

    def deliver(self, context: int, source: int, message: Message) -> None:
        """Puts a message into the inbox and wakes who waits for it."""
        self.inbox.put(context, source, message)
        for entry in self._parked:
            want, task = entry
            if want.context == context and want.tag == message.tag and want.source in (None, source):
                self._parked.remove(entry)
                self.cluster.time.wake(task)
                return

    def hear_of_loss(self, rank: int) -> None:
        """Notes that a peer is gone and lets all parked tasks look again."""
        self.inbox.lose(rank)
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


class SimulatedCluster:
    """All ranks of a simulated run.

    Attributes:
        time: the virtual time.
        network: the links.
        nbytes_of: gives the bytes of a message on the links.
        ranks: one entry a rank.
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
                other.hear_of_loss(rank)


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


class SendHandle:
    """A message that is leaving."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._left = False
        self._waiter: Task | None = None

    def sent(self) -> None:
        """Called by the network when the message has left."""
        self._left = True
        if self._waiter is not None:
            self._time.wake(self._waiter)

    def done(self) -> bool:
        """Whether the message has left."""
        return self._left

    def wait(self) -> None:
        """Parks until the message has left."""
        if not self._left:
            self._waiter = self._time.running()
            self._time.park("a message to leave")


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

    def start_send(self, to: int, message: Message) -> SendHandle:
        """Starts to send; what arrives is what the tensor holds now."""
        source, target = self._home.rank, self._members[to]
        if self._home.inbox.is_lost(target):
            raise PeerLost(target, "sending to it")
        copy = message.received()
        receiver, context = self._home.cluster.ranks[target], self._context
        handle = SendHandle(self.clock)
        nbytes = self._home.cluster.nbytes_of(message)
        self._home.bytes_sent += nbytes
        self._home.cluster.network.transfer(
            source, target, nbytes, handle.sent, lambda: receiver.deliver(context, source, copy)
        )
        return handle

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""
        who = "anyone" if source is None else f"rank {self._members[source]}"
        global_source, message = self._home.take(self._want(source, tag), f"a message from {who}")
        return self._numbers[global_source], message

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        """Takes a message if one is there."""
        found = self._home.take_now(self._want(source, tag))
        return None if found is None else (self._numbers[found[0]], found[1])

    def start(self, work: Callable[[], Any]) -> Handle:
        """Runs `work` as a task of its own."""
        name = f"rank {self._home.rank}'s background work"
        return TaskHandle(self.clock, self.clock.spawn(name, work, awaited=True))

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

    def _want(self, source: int | None, tag: int) -> Want:
        return Want(self._context, None if source is None else self._members[source], tag, self._members)

    def _apart(self) -> SimulatedCommunicator:
        """Gives the message space of collectives, which number their messages' tags themselves."""
        if self._collective_space is None:
            group = self._home.cluster.group(f"{self._group.name}#collectives", self._members)
            self._collective_space = SimulatedCommunicator(self._home, group)
        return self._collective_space

    def _next_tag(self) -> int:
        self._collectives += 1
        return self._collectives
