"""What a link has to send, and keeps until the receiver has it."""

from __future__ import annotations

from collections import deque

from polyrhythm.communication.transports.tcp.send_handle import SendHandle


class Outbox:
    """Messages in the order of sending. Knows nothing of threads: its owner locks.

        0 1 2 3 │ 4 5 6 │ 7 8 9
        arrived │ written │ to be written        after a break, writing goes on behind what has arrived

    Attributes:
        arrived: messages that the receiver has.
        started: bytes of the next message that have been written already.
    """

    def __init__(self) -> None:
        self.arrived = self.started = 0
        self._kept: deque[SendHandle] = deque()
        self._written = 0

    @property
    def waits(self) -> bool:
        """Whether there is something to be written."""
        return self._written < self.arrived + len(self._kept)

    def put(self, message: SendHandle) -> None:
        """Adds a message."""
        self._kept.append(message)

    def next(self) -> tuple[int, SendHandle]:
        """Gives what is to be written next, and its number."""
        return self._written, self._kept[self._written - self.arrived]

    def wrote(self, number: int) -> None:
        """Notes that all of a message has been written; its receiver may have said so before."""
        if number == self._written:
            self._kept[number - self.arrived].written()
            self._written, self.started = number + 1, 0

    def arrive(self, count: int) -> bool:
        """Notes that the receiver has the first `count` messages; gives whether that can be."""
        if not self.arrived <= count <= self.arrived + len(self._kept):
            return False
        while self.arrived < count:
            self._kept.popleft().end(broken=False)
            self.arrived += 1
        if self._written < count:
            self._written, self.started = count, 0
        return True

    def rewind(self) -> None:
        """Has all that has not arrived written again: the connection is new."""
        self._written, self.started = self.arrived, 0

    def end(self) -> None:
        """Lets go of all that has not arrived."""
        while self._kept:
            self._kept.popleft().end(broken=True)
