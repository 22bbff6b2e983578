"""What every reader of events is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polyrhythm.events import Event


class Observer(Protocol):
    """Someone who is told every event of a run, in order, by one thread."""

    def on_event(self, event: Event) -> None:
        """Takes one event; returns soon, since the run waits for it."""

    def close(self) -> None:
        """Writes out what is held back and lets go of files and the terminal; a second call does nothing."""
