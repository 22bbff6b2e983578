"""How busy a server was."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.events import ServerProgress


class ServerLoad:
    """Means over all that a server has said, each stretch for its length.

    Attributes:
        seconds: of all stretches.
        dropped: gradients that came too late.
        gradients: applied, with what they have been counted with.
        busy_s: in which it did not wait for messages.
        updating_s: of these, spent on what came and not on moving it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.dropped = 0
        self.gradients = 0
        self.busy_s = 0.0
        self.updating_s = 0.0
        self._queue_s = 0.0

    def add(self, event: ServerProgress) -> None:
        """Takes one more stretch."""
        self.seconds += event.seconds
        self.dropped = event.dropped
        self.gradients += sum(event.staleness.values())
        self.busy_s += event.busy_share * event.seconds
        self.updating_s += event.updating_s
        self._queue_s += event.queue * event.seconds

    @property
    def busy_share(self) -> float:
        """The fraction of its time in which it did not wait for messages; 0 before it has said anything."""
        return self.busy_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def queue(self) -> float:
        """Messages in a row that it found waiting, in the mean; 0 before it has said anything."""
        return self._queue_s / self.seconds if self.seconds > 0 else 0.0
