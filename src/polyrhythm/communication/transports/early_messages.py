"""Messages for communicators that their receiver has not made yet, and how many of them may wait."""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import HEADER_BYTES, MalformedMessage, Reason

MOST_EARLY = 1 << 14
"""Of one sender. One of ours that is ahead sends a few, and then waits for an answer."""


class EarlyMessages:
    """Counts, by sender, what waits for communicators that this rank has not made. Knows nothing of threads.

    A communicator is made by each of its ranks when that one comes to it, so messages of another may be there before.
    But nobody ever takes what is for a communicator that nobody makes, and a peer that sends such must not fill the
    memory of this rank.
    """

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._messages: dict[int, Counter[int]] = {}  # sender -> context -> how many
        self._bytes: dict[int, Counter[int]] = {}
        self._all_messages: Counter[int] = Counter()  # sender -> how many
        self._all_bytes: Counter[int] = Counter()

    def make(self, context: int) -> None:
        """Notes that this rank has made a communicator: what is for it is no longer early."""
        self._made.add(context)
        self.drop(context)

    def drop(self, context: int) -> None:
        """Forgets what waits for a communicator."""
        for sender, messages in self._messages.items():
            self._all_messages[sender] -= messages.pop(context, 0)
            self._all_bytes[sender] -= self._bytes[sender].pop(context, 0)

    def forget(self, sender: int) -> None:
        """Forgets what waits of a rank: a successor has its number."""
        for counted in (self._messages, self._bytes, self._all_messages, self._all_bytes):
            counted.pop(sender, None)

    def is_early(self, context: int) -> bool:
        """Whether this rank has not made a communicator."""
        return context not in self._made

    def count(self, context: int, sender: int, nbytes: int, most_bytes: int) -> None:
        """Counts a message, if it is early.

        Args:
            context: of the communicator that it is for.
            sender: global rank.
            nbytes: of header and payload.
            most_bytes: that the payload of one message may have; so much of a sender's may wait altogether.

        Raises:
            MalformedMessage: that would be too many; nothing has been changed.
        """
        if context in self._made:
            return
        messages, waiting_bytes = self._all_messages[sender] + 1, self._all_bytes[sender] + nbytes
        if messages > MOST_EARLY or waiting_bytes > most_bytes + messages * HEADER_BYTES:
            raise MalformedMessage(
                f"{messages:,} messages with {waiting_bytes:,} bytes came for communicators that this rank has not "
                f"made, where {MOST_EARLY:,} messages and {most_bytes:,} bytes of payload may wait",
                Reason.EARLY,
            )
        self._messages.setdefault(sender, Counter())[context] += 1
        self._bytes.setdefault(sender, Counter())[context] += nbytes
        self._all_messages[sender], self._all_bytes[sender] = messages, waiting_bytes
