"""What only a simulation knows of a run, added to the run's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from polyrhythm.events import Event, Notice, RunEnded, RunStarted, WorkerProgress
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.timeline import Timeline

WATCHED_WORKERS, WATCHED_SERVERS = 64, 16
"""So many have a timeline; of all it would be too long to be looked at."""


class ClusterFigures:
    """Passes events on, and completes the figures that come with the last.

    Args:
        layout: the cluster, and who is where.
        known: figures that are known beforehand; they win.
        timeline: of the run, which may not hold all of it.
        emit: takes the events.
    """

    def __init__(
        self, layout: Layout, known: dict[str, Any], timeline: Timeline, emit: Callable[[Event], None]
    ) -> None:
        self._layout = layout
        self._known = known
        self._timeline = timeline
        self._emit = emit
        self._waited_s = 0.0
        self._worked_s: dict[int, float] = {}

    def on_event(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, WorkerProgress):
            self._waited_s += event.wait_s
            self._worked_s[event.worker] = event.time_s
        if isinstance(event, RunEnded):
            self._say_where_the_timeline_ends(event.time_s)
            event = dataclasses.replace(event, result={**event.result, **self._figures(event.result)})
        self._emit(event)
        if isinstance(event, RunStarted) and self._timeline.ranks is not None:
            self._emit(Notice(time_s=event.time_s, text=_watched(self._layout, self._timeline.ranks)))

    def _say_where_the_timeline_ends(self, time_s: float) -> None:
        if self._timeline.full_at_s is not None:
            text = f"trace.json holds the first {self._timeline.full_at_s:.3g} s only, which filled it"
            self._emit(Notice(time_s=time_s, text=text))

    def _figures(self, result: dict[str, Any]) -> dict[str, Any]:
        worked_s = sum(self._worked_s.values())
        return {
            "waiting_share": self._waited_s / worked_s if worked_s > 0 else 0.0,
            "cluster": self._layout.cluster.name,
            "hosts": len(self._layout.hosts_used),
            "price": result["seconds"] / 3600 * self._layout.price_per_hour,
            **self._known,
        }


def watched_ranks(layout: Layout) -> frozenset[int] | None:
    """Chooses the ranks whose timeline is kept: the first of each role; None where that is everybody."""
    cast = layout.cast
    if len(cast.workers) <= WATCHED_WORKERS and len(cast.servers) <= WATCHED_SERVERS:
        return None
    return frozenset((*cast.workers[:WATCHED_WORKERS], *cast.servers[:WATCHED_SERVERS]))


def _watched(layout: Layout, ranks: frozenset[int]) -> str:
    cast = layout.cast
    parts = [("workers", cast.workers), ("servers", cast.servers)]
    counted = [
        f"{sum(rank in ranks for rank in members):,} of {len(members):,} {role}"
        for role, members in parts
        if members
    ]
    return f"trace.json shows the first {' and '.join(counted)}"
