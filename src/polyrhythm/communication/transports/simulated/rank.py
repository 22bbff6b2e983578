"""One simulated rank: its inbox, its links, the tasks that wait, and the messages on their way to and from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.inbox import Inbox, Want
from polyrhythm.communication.transports.member_collectives import REVOKED, CollectiveBroken
from polyrhythm.communication.transports.simulated.contended_network import Flow
from polyrhythm.communication.transports.simulated.network import Network
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime, running
from polyrhythm.errors import PeerLost

_REVOKE = Kind.REVOKE


class Ranks(Protocol):
    """All ranks of a simulated run.

    Attributes:
        time: the virtual time.
        ranks: one entry a rank: the latest under its number.
    """

    time: VirtualTime
    ranks: list[SimulatedRank]


class SimulatedRank:
    """State of one rank, shared by its communicators: an inbox, and tasks parked on it.

    A rank that was killed may have a replacement: another such object under the same number. Links are
    between objects, so no message for the one reaches the other.

    Attributes:
        generation: number of its predecessors under this number.
        alive: whether it has not been killed.
        bytes_sent: bytes sent by this rank, through all its communicators.
        bytes_inside: those of them that went to ranks of its host.
        beside: the ranks of its host, if it has a cluster's hosts and others are there.
        peers: the other ends of its links, by their number.
        parked: tasks that wait for messages, and for which.
        broken: peers with broken links; they may live.
        met: generation of each rank when this one arrived; earlier events do not concern it.
        lines: lines by peer, the last of the parcels that leave in their order, while it has not left; see
            `FollowingParcel`.
    """

    # Slots, here and below: among thousands of ranks each line of memory that a step touches is out of the cache.
    __slots__ = (
        "_time",
        "alive",
        "beside",
        "broken",
        "bytes_inside",
        "bytes_sent",
        "cluster",
        "generation",
        "inbox",
        "lines",
        "met",
        "parked",
        "peers",
        "rank",
    )

    def __init__(self, cluster: Ranks, rank: int, generation: int = 0) -> None:
        self.cluster = cluster
        self.rank = rank
        self.generation = generation
        self.alive = True
        self.bytes_sent = self.bytes_inside = 0
        self.beside: frozenset[int] = frozenset()
        self.inbox = Inbox()
        self._time = cluster.time
        self.parked: list[tuple[Want, Task]] = []
        self.peers: dict[int, SimulatedRank] = {}
        self.met: dict[int, int] = {}
        self.broken: set[SimulatedRank] = set()
        self.lines: dict[SimulatedRank, FollowingParcel] = {}

    def peer(self, context: int, rank: int) -> SimulatedRank:
        """Return the other end of the link to a rank.

        Raises:
            PeerLost: the peer is lost as far as this rank knows, or there is no process to open a link to.
        """
        if not self.inbox.quiet and self.inbox.is_lost_to(context, rank):
            raise PeerLost(rank, "sending to it")
        found = self.peers.get(rank)
        if found is None:
            found = self.cluster.ranks[rank]
            if not found.alive:
                raise PeerLost(rank, "opening a link to it")
            self.accepts(found)
            if self.inbox.is_lost_to(context, rank):
                raise PeerLost(rank, "opening a link to it")
        return found

    def accepts(self, source: SimulatedRank) -> bool:
        """Return whether there is a link from this rank; a replacement's first message opens one."""
        known = self.peers.get(source.rank)
        if known is source:
            return source not in self.broken
        before = self.met.get(source.rank, 0) if known is None else known.generation
        if before > source.generation:
            return False
        self.peers[source.rank] = source
        if known is None and before == source.generation:  # there was none before that it could know of
            return source not in self.broken
        self.inbox.regain(source.rank, source.generation)
        self.revoke_useless()
        self._look_again()
        return True

    def expect(self, rank: int, generation: int) -> None:
        """Note the generation of a rank's present process."""
        newest = self.cluster.ranks[rank]
        if newest is not self and newest.generation == generation:
            self.accepts(newest)

    def revoke(self, context: int) -> None:
        """End the use of a communicator on this rank."""
        if self.inbox.revoke(context):
            self._look_again()

    def revoke_useless(self) -> None:
        """End the use of communicators that need a lost rank."""
        for context in self.inbox.useless():
            self.revoke(context)

    def note_loss(self, lost: SimulatedRank) -> None:
        """Record that a peer is lost, unless its replacement has sent a message."""
        if self.alive and self.peers.setdefault(lost.rank, lost).generation <= lost.generation:
            self.peers[lost.rank] = lost
            self.inbox.lose(lost.rank, lost.generation)
            self.revoke_useless()
            self._look_again()

    def break_link(self, peer: SimulatedRank) -> None:
        """Break the link with a peer, which may live: no more messages arrive from it."""
        self.broken.add(peer)
        self.note_loss(peer)

    def _look_again(self) -> None:
        """Make all parked tasks check whether the awaited messages can still arrive."""
        parked, self.parked = self.parked, []
        for _, task in parked:
            self._time.wake_soon(task)

    def take(self, want: Want, reason: str) -> tuple[int, Message]:
        """Receive, parking the running task until the message is there."""
        inbox = self.inbox
        while True:
            if inbox.arrived or not inbox.quiet:
                found = self.take_now(want, reason)
                if found is not None:
                    return found
            task = running()
            self.parked.append((want, task))
            received: tuple[int, Message] | tuple[()] = self._time.park(reason, task)
            if received:
                return received

    def take_now(self, want: Want, reason: str = "looking for a message") -> tuple[int, Message] | None:
        """Receive if the message is there."""
        inbox = self.inbox
        if inbox.quiet:
            return inbox.take(want)
        if inbox.is_revoked(want.lineage):
            raise CollectiveBroken(REVOKED)
        found = inbox.take(want)
        if found is None:
            lost = inbox.unreported_loss(want)
            if lost is not None:
                raise PeerLost(lost, reason, inbox.losses(lost))
        return found


class Parcel(Flow):
    """A message on its way, and its sender's handle on it.

    Attributes:
        source: rank of the sender.
        to: rank of the receiver.
        context: context of the communicator.
        message: message that arrives.
        nbytes: number of bytes on the links.
    """

    __slots__ = ("_left", "_waiter", "context", "message", "nbytes", "source", "to")

    def __init__(
        self, source: SimulatedRank, to: SimulatedRank, context: int, message: Message, nbytes: int
    ) -> None:
        self.source = source
        self.to = to
        self.context = context
        self.message = message
        self.nbytes = self.left = nbytes
        self.bundle = None
        self._left = False
        self._waiter: Task | None = None

    def sent(self) -> None:
        """Called when the message has left; that of a sender killed in the meantime never does."""
        if not self.source.alive:
            return
        self._left = True
        if self._waiter is not None:
            self._waiter.switch()

    def arrive(self) -> None:
        """Called when the last byte is there: hand the message to the task that waits for it, or else to the inbox.

        One that has not left does not arrive, and a broken link brings nothing.
        """
        if not self._left:
            return
        to, source, context, message = self.to, self.source, self.context, self.message
        rank = source.rank
        if to.peers.get(rank) is not source or to.broken:
            if not (to.alive and to.accepts(source)):
                return
        elif not to.alive:
            return
        # By their places: the fields of a named tuple are looked up in its class each time.
        if message[0] is _REVOKE:
            to.revoke(context)
            return
        parked = to.parked
        for waiting in parked:  # a waiting task has looked at all earlier messages
            want = waiting[0]
            awaited = want.source
            if want.context == context and want.tag == message[7] and (awaited is None or awaited == rank):
                parked.remove(waiting)
                waiting[1].switch((rank, message))
                return
        to.inbox.put(context, rank, message)

    def done(self) -> bool:
        """Return whether the message has left."""
        return self._left

    def wait(self) -> None:
        """Park until the message has left."""
        if not self._left:
            time = self.source.cluster.time
            self._waiter = running()
            time.park("a message to leave", self._waiter)


class FollowingParcel(Parcel):
    """A message that leaves behind another one to the same rank, as the bytes of one connection do.

    Messages that are each waited for before the next one is sent need no order. Others do: a request would overtake the
    push before it, and on links that all flows share parts of one vector would arrive together, at the end.

    Args:
        start: function that puts it on the links as soon as the previous message has left.

    Attributes:
        following: message that waits for this one to leave.
    """

    __slots__ = ("_start", "following")

    def __init__(
        self,
        source: SimulatedRank,
        to: SimulatedRank,
        context: int,
        message: Message,
        nbytes: int,
        start: Callable[[Parcel], None],
    ) -> None:
        # As in `Parcel`, without another call.
        self.source = source
        self.to = to
        self.context = context
        self.message = message
        self.nbytes = self.left = nbytes
        self.bundle = None
        self._left = False
        self._waiter = None
        self._start = start
        self.following: FollowingParcel | None = None
        source.lines[to] = self

    def sent(self) -> None:
        source, to = self.source, self.to
        if source.alive:
            self._left = True
            if self._waiter is not None:
                self._waiter.switch()  # which may send another message
        following, lines = self.following, source.lines
        if following is not None:
            if source.alive:
                self.following = None
                following._start(following)
        elif to in lines and lines[to] is self:
            del lines[to]


class Courier(Protocol):
    """Takes messages over the links, where more may happen to them than that they start now and arrive."""

    def carry(self, parcel: Parcel) -> None:
        """Start now: call the parcel's `sent` when it has left, and `arrive` when it is there."""

    def report_loss(self, lost: SimulatedRank, to: SimulatedRank) -> None:
        """Notify a rank of another's loss, after all messages of the latter."""


def report_loss(network: Network, lost: SimulatedRank, to: SimulatedRank) -> None:
    """Notify a rank of another's loss, one latency later, as the end of a TCP connection takes."""
    time = lost.cluster.time
    time.at(time.now() + network.alpha_s(lost.rank, to.rank), partial(to.note_loss, lost))
