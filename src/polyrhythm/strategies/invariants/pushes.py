"""Which gradients every update is made of, found out from the messages alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.invariant import Handled, Violation


@dataclass(slots=True)
class Push:
    """A gradient that a server holds or has applied.

    Attributes:
        source: who pushed it.
        message: the push.
        doubtful: whether an update may have been made without it.
    """

    source: int
    message: Message
    doubtful: bool = False


class Pushes:
    """Follows the gradients from their coming to their update.

    A server holds what comes, and an update takes all that is held. A step that has come before does not count again.

    Args:
        drops: whether a gradient of an earlier step than the server's is dropped, and what a lost pusher had pushed;
            pushers then leave out steps, and every update is a step.
        doubts: whether servers drop what a lost pusher had pushed unless all have it; then it comes again.
    """

    def __init__(self, *, drops: bool = False, doubts: bool = False) -> None:
        self._drops = drops
        self._doubts = doubts
        self._come: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._held: defaultdict[int, list[Push]] = defaultdict(list)

    def come(self, server: int, source: int) -> int:
        """How many steps of a pusher have come to a server."""
        return self._come[server, source]

    def follow(self, event: Handled) -> list[Push]:
        """Takes an event; gives the gradients of the update that it made, if it made one.

        Raises:
            Violation: a step came before the one ahead of it.
        """
        message, key = event.message, (event.server, event.source)
        if self._drops and message is None:
            held = self._held[event.server]
            self._held[event.server] = [push for push in held if push.source != event.source]
        if message is not None and message.kind is Kind.PUSH:
            ahead = message.step - self._come[key]
            if ahead > self._doubts and not self._drops:
                raise Violation(
                    f"a gradient of rank {event.source}",
                    rank=event.server,
                    time_s=event.time_s,
                    expected=f"step {self._come[key]}",
                    found=f"step {message.step}",
                )
            if message.step >= (event.version_before if self._drops else self._come[key]):
                self._come[key] = message.step + 1
                self._held[event.server].append(Push(event.source, message))
        if self._doubts and message is None:
            for push in self._held[event.server]:
                if push.source == event.source:
                    push.doubtful = True
                    self._come[key] = min(self._come[key], push.message.step)
        if event.version == event.version_before:
            return []
        return self._held.pop(event.server, [])
