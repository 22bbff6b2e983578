"""A fact that a run emits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fact at a time.

    Attributes:
        time_s: seconds since training started, on the run's clock.
    """

    time_s: float

    def to_json(self) -> dict[str, Any]:
        """Gives the event as a JSON-able dict; `event` holds its class name."""
        return {"event": type(self).__name__, **vars(self)}
