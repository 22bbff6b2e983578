"""Progress: while a run goes on, something gets on within a bound."""

from __future__ import annotations

from polyrhythm.strategies.invariant import Delivered, Handled, Invariant, Stepped, Violation


class Progress(Invariant):
    """Virtual time since the last update or step stays within a bound.

    Args:
        patience_s: the bound.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._latest_s = 0.0

    def delivered(self, event: Delivered) -> None:
        """Messages alone are no progress."""
        quiet_s = event.time_s - self._latest_s
        if quiet_s > self._patience_s:
            raise Violation(
                "messages, but neither an update nor a step",
                rank=event.to,
                time_s=event.time_s,
                expected=f"one within {self._patience_s:g} s",
                found=f"none for {quiet_s:g} s",
            )

    def handled(self, event: Handled) -> None:
        """An update is progress."""
        if event.version != event.version_before:
            self._latest_s = event.time_s

    def stepped(self, event: Stepped) -> None:
        """A step is progress."""
        self._latest_s = event.time_s
