"""Messages that have arrived at a rank and wait to be received, by context, sender and tag.

Messages may arrive for communicators that their receiver has not made yet; `EarlyMessages` bounds how many of
them may wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.message import HEADER_BYTES, MalformedMessage, Message, Reason


@dataclass(frozen=True, slots=True)
class Want:
    """Criteria of a receive.

    Attributes:
        context: the communicator that it receives on.
        source: global rank of the sender, or None for anyone in `members`.
        tag: the message's tag.
        members: global ranks of the communicator.
        lineage: contexts of the communicators that end the wait when revoked: its own, and those that it is a
            part of.
    """

    context: int
    source: int | None
    tag: int
    members: tuple[int, ...]
    lineage: tuple[int, ...] = ()


class Target:
    """Memory of a waiting receive, for a link to write the payload of its message to.

    Attributes:
        want: criteria of the receive, with a source.
        tensor: the memory, `(n,)`.
        interrupt: function that ends the writing of a link, which calls it back; None: no link writes.
        message: the message, once all of it has been written.
    """

    __slots__ = ("interrupt", "message", "tensor", "want")

    def __init__(self, want: Want, tensor: Tensor) -> None:
        self.want = want
        self.tensor = tensor
        self.interrupt: Callable[[], None] | None = None
        self.message: Message | None = None


class Inbox:
    """Messages in the order of their arrival. Knows nothing of threads or time: its owner locks or switches.

    A rank may be lost and get a replacement under the same number. A receiver is notified of the loss before
    it gets messages of the replacement, and until then it cannot know that it would answer another process.

    Attributes:
        quiet: whether no rank has been lost so far, and nothing revoked.
        arrived: waiting messages, with their senders, by context and tag.
    """

    __slots__ = ("_announced", "_losses", "_lost", "_needs", "_revoked", "_targets", "arrived", "quiet")

    def __init__(self) -> None:
        self.quiet = True
        self.arrived: dict[tuple[int, int], deque[tuple[int, Message]]] = {}
        self._lost: set[int] = set()
        self._losses: dict[int, int] = {}
        self._announced: dict[tuple[int, int | None, int], int] = {}
        self._revoked: set[int] = set()
        self._needs: dict[int, tuple[int, int]] = {}
        self._targets: list[Target] = []

    def offer(self, want: Want, tensor: Tensor) -> Target:
        """Offer the memory of a receive that finds no message, until `withdraw`."""
        target = Target(want, tensor)
        self._targets.append(target)
        return target

    def withdraw(self, target: Target) -> None:
        """End an offer: no link begins to write to the memory any more."""
        self._targets.remove(target)

    def target(self, context: int, source: int, message: Message) -> Target | None:
        """Return the memory of the receive that will take a message, if the payload, which follows, fits in it."""
        payload = message.tensor
        for target in self._targets:
            want, tensor = target.want, target.tensor
            if (
                (want.context, want.source, want.tag) == (context, source, message.tag)
                and target.interrupt is None
                and target.message is None
                and payload is not None
                and (payload.dtype, payload.shape) == (tensor.dtype, tensor.shape)
                and not any(earlier == source for earlier, _ in self.arrived.get((context, want.tag), ()))
                and not (self._losses and self._succeeds_unheard(source, want))
            ):
                return target
        return None

    def is_offered(self, target: Target) -> bool:
        """Return whether a receive still waits with this memory."""
        return target in self._targets

    def put(self, context: int, source: int, message: Message) -> None:
        """Add a message from global rank `source`."""
        key = context, message.tag
        queue = self.arrived.get(key)
        if queue is None:
            queue = self.arrived[key] = deque()
        queue.append((source, message))

    def take(self, want: Want) -> tuple[int, Message] | None:
        """Take the oldest message that is wanted, if there is one."""
        queue = self.arrived.get((want.context, want.tag))
        if not queue:
            return None
        for position, (source, message) in enumerate(queue):
            if want.source in (None, source) and not (self._losses and self._succeeds_unheard(source, want)):
                del queue[position]
                if not queue:  # tags of collectives are never reused
                    del self.arrived[want.context, want.tag]
                return source, message
        return None

    def drop(self, context: int) -> None:
        """Drop the arrived messages of a communicator."""
        for key in [key for key in self.arrived if key[0] == context]:
            del self.arrived[key]

    def revoke(self, context: int) -> bool:
        """Note that a communicator must not be used any more; return whether that is news."""
        news = context not in self._revoked
        self._revoked.add(context)
        self._needs.pop(context, None)
        self.quiet = False
        return news

    def need(self, context: int, rank: int, generation: int) -> None:
        """Note that a communicator becomes unusable once a rank is at a later generation than `generation`."""
        self._needs[context] = rank, generation

    def useless(self) -> list[int]:
        """Return the communicators that need a lost rank."""
        return [
            context
            for context, (rank, generation) in self._needs.items()
            if self._losses.get(rank, 0) > generation
        ]

    def is_revoked(self, lineage: tuple[int, ...]) -> bool:
        """Return whether a communicator may not be used any more, or one that it is a part of."""
        return bool(self._revoked) and not self._revoked.isdisjoint(lineage)

    def lose(self, rank: int, generation: int = 0) -> None:
        """Record that a global rank of this generation is lost."""
        if rank not in self._lost:
            self.quiet = False
            self._lost.add(rank)
            self._losses[rank] = max(self._losses.get(rank, 0), generation) + 1
        elif generation >= self._losses[rank]:  # a replacement that was never heard
            self._losses[rank] = generation + 1

    def regain(self, rank: int, generation: int = 1) -> None:
        """Note that a replacement of a global rank is there; the remaining messages of the former one are dropped."""
        self.lose(rank, generation - 1)  # the loss may be unnoticed
        self._lost.remove(rank)
        self._losses[rank] = max(self._losses[rank], generation)
        for key, queue in list(self.arrived.items()):
            kept = deque(entry for entry in queue if entry[0] != rank)
            if kept:
                self.arrived[key] = kept
            else:
                del self.arrived[key]

    def is_lost(self, rank: int) -> bool:
        """Return whether a global rank is known to be gone, and no replacement is there."""
        return rank in self._lost

    def is_lost_to(self, context: int, rank: int) -> bool:
        """Return whether a message to a rank would now be meant for a process that is gone.

        This holds while there is no replacement, or this context has not been notified of one.
        """
        if rank not in self._losses:
            return False
        known = max(self._announced.get((context, source, rank), 0) for source in (None, rank))
        return rank in self._lost or known < self._losses[rank]

    def know_losses(self, context: int, generations: Mapping[int, int]) -> None:
        """Note the generations of a communicator's ranks: earlier losses are no news on it."""
        for rank, generation in generations.items():
            self._announced[context, None, rank] = self._announced[context, rank, rank] = generation

    def losses(self, rank: int) -> int:
        """Return how many that had a global rank are known to be gone."""
        return self._losses.get(rank, 0)

    def unreported_loss(self, want: Want) -> int | None:
        """Return a lost rank to report to this receiver: its own source while it is lost, any member once."""
        for rank, losses in self._losses.items():
            if want.source is None:
                concerns = rank in want.members and self._is_unreported(rank, want)
            else:
                concerns = rank == want.source and (rank in self._lost or self._is_unreported(rank, want))
            if concerns:
                self._announced[want.context, want.source, rank] = losses
                return rank
        return None

    def _is_unreported(self, rank: int, want: Want) -> bool:
        return self._announced.get((want.context, want.source, rank), 0) < self._losses.get(rank, 0)

    def _succeeds_unheard(self, rank: int, want: Want) -> bool:
        """Return whether a rank is a replacement, and this receiver has not been notified of the failure before it."""
        return rank not in self._lost and self._is_unreported(rank, want)


MOST_EARLY = 1 << 14
"""Limit of one sender. A rank of this run that is ahead sends a few, and then waits for an answer."""


class EarlyMessages:
    """Counts, by sender, what waits for communicators that this rank has not made. Knows nothing of threads.

    A communicator is made by each of its ranks at its own time, so messages of another may be there before.
    But messages for a communicator that is never made are never taken, and a peer that sends such must not
    fill the memory of this rank.
    """

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._messages: dict[int, Counter[int]] = {}  # sender -> context -> how many
        self._bytes: dict[int, Counter[int]] = {}
        self._all_messages: Counter[int] = Counter()  # sender -> how many
        self._all_bytes: Counter[int] = Counter()

    def make(self, context: int) -> None:
        """Note that this rank has made a communicator: what is for it is no longer early."""
        self._made.add(context)
        self.drop(context)

    def drop(self, context: int) -> None:
        """Drop the waiting messages of a communicator."""
        for sender, messages in self._messages.items():
            self._all_messages[sender] -= messages.pop(context, 0)
            self._all_bytes[sender] -= self._bytes[sender].pop(context, 0)

    def forget(self, sender: int) -> None:
        """Drop the waiting messages of a rank: a replacement has its number."""
        for counted in (self._messages, self._bytes, self._all_messages, self._all_bytes):
            counted.pop(sender, None)

    def is_early(self, context: int) -> bool:
        """Return whether this rank has not made a communicator."""
        return context not in self._made

    def count(self, context: int, sender: int, nbytes: int, most_bytes: int) -> None:
        """Count a message, if it is early.

        Args:
            context: context of the communicator that it is for.
            sender: global rank.
            nbytes: number of bytes of header and payload.
            most_bytes: largest payload of one message; all waiting payloads of a sender together are limited
                to it.

        Raises:
            MalformedMessage: the limit would be exceeded; nothing has been changed.
        """
        if context in self._made:
            return
        messages, waiting_bytes = self._all_messages[sender] + 1, self._all_bytes[sender] + nbytes
        if messages > MOST_EARLY or waiting_bytes > most_bytes + messages * HEADER_BYTES:
            raise MalformedMessage(
                f"{messages:,} messages with {waiting_bytes:,} bytes arrived for communicators that this rank has not "
                f"made, where {MOST_EARLY:,} messages and {most_bytes:,} bytes of payload may wait",
                Reason.EARLY,
            )
        self._messages.setdefault(sender, Counter())[context] += 1
        self._bytes.setdefault(sender, Counter())[context] += nbytes
        self._all_messages[sender], self._all_bytes[sender] = messages, waiting_bytes
