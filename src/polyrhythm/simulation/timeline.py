"""Record when every rank computes, waits and sends, as a trace for Perfetto.

Computing and waiting follow each other; of sends, a rank may have several in progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.chrome_trace import TraceRank, write_trace
from polyrhythm.communication.transports.simulated.network import Action, Network
from polyrhythm.communication.transports.simulated.virtual_time import Task, VirtualTime, running

COMPUTE, WAIT = "compute", "wait"


@dataclass
class Span:
    """A stretch of time of one rank.

    Attributes:
        rank: number of the rank.
        kind: `compute`, or what is computed (`forward 3`), or `wait`.
        start_s: start, in seconds.
        end_s: end, in seconds.
        detail: awaited event.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    detail: str = ""


@dataclass(frozen=True)
class Sending:
    """A message in progress from its start until it has left."""

    rank: int
    to: int
    nbytes: int
    start_s: float
    end_s: float


class Timeline:
    """Spans and sends of ranks, in bounded memory.

    Args:
        ranks: ranks that are recorded; None: all. Sends are recorded if both their ranks are.
        most: largest number of recorded spans and sends; later ones are dropped.

    Attributes:
        ranks: the argument of that name.
        spans: spans of computing and waiting, in the order of their ends.
        sendings: sendings in the order of their ends.
        full_at_s: time of the last recorded one, if some were not recorded.
    """

    def __init__(self, ranks: frozenset[int] | None = None, most: int = 200_000) -> None:
        self.ranks = ranks
        self.spans: list[Span] = []
        self.sendings: list[Sending] = []
        self.full_at_s: float | None = None
        self._most = most
        self._latest: dict[int, Span] = {}

    def watches(self, rank: int) -> bool:
        """Return whether a rank is recorded."""
        return self.ranks is None or rank in self.ranks

    def send(self, sending: Sending) -> None:
        """Add a message that has left."""
        if self._has_room(sending.end_s):
            self.sendings.append(sending)

    def add(self, span: Span) -> None:
        """Add a span; one that continues its rank's latest lengthens that."""
        if not self._has_room(span.end_s):
            return
        before = self._latest.get(span.rank)
        joins = before is not None and (before.kind, before.detail, before.end_s) == (
            span.kind,
            span.detail,
            span.start_s,
        )
        if before is not None and joins:
            before.end_s = span.end_s
        elif span.end_s > span.start_s:
            self._latest[span.rank] = span
            self.spans.append(span)

    def _has_room(self, now_s: float) -> bool:
        if self.full_at_s is None and len(self.spans) + len(self.sendings) >= self._most:
            self.full_at_s = now_s
        return self.full_at_s is None

    def write(self, path: Path, rank_names: dict[int, str], host_of: dict[int, tuple[int, str]]) -> None:
        """Write a trace file; times become microseconds.

        Args:
            path: path of the file.
            rank_names: names of all ranks.
            host_of: number and name of each rank's host.
        """
        places = {rank: TraceRank(host_of[rank][0], rank) for rank in rank_names if self.watches(rank)}
        records = [
            record
            for rank, place in places.items()
            for record in place.named(host_of[rank][1], rank_names[rank])
        ]
        for span in self.spans:
            known = {"for": span.detail} if span.detail else {}
            records.append(places[span.rank].does(span.kind, span.start_s, span.end_s, **known))
        for number, sent in enumerate(self.sendings):
            records += places[sent.rank].sends(
                number, rank_names[sent.to], sent.nbytes, sent.start_s, sent.end_s
            )
        write_trace(path, records)


class ObservedTime(VirtualTime):
    """Virtual time that records when the ranks' own tasks compute and wait.

    Attributes:
        ranks: the rank of every task that is recorded; background tasks are not.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.ranks: dict[Task, int] = {}
        self._timeline = timeline

    def note(self, task: Task, rank: int) -> None:
        """Record a task as its rank, if the timeline records that rank."""
        if self._timeline.watches(rank):
            self.ranks[task] = rank

    def sleep(self, seconds: float, what: str = "") -> None:
        """Park the running task; only computing sleeps."""
        start = self.now_s
        super().sleep(seconds)
        self._note(what or COMPUTE, start)

    def park(self, reason: str, task: Task | None = None) -> Any:
        start = self.now_s
        received = super().park(reason, task)
        self._note(WAIT, start, reason)
        return received

    def _note(self, kind: str, start_s: float, detail: str = "") -> None:
        rank = self.ranks.get(running())
        if rank is not None:
            self._timeline.add(Span(rank, kind, start_s, self.now_s, detail))


class ObservedNetwork:
    """A network that records every message; implements `Network`.

    Args:
        network: network that carries the messages.
        time: virtual time of the simulation.
        timeline: the record.
    """

    def __init__(self, network: Network, time: VirtualTime, timeline: Timeline) -> None:
        self._network = network
        self._time = time
        self._timeline = timeline

    def transfer(self, source: int, to: int, nbytes: int, sent: Action, arrived: Action) -> None:
        """Start a transfer now; see `Network.transfer`."""
        if not (self._timeline.watches(source) and self._timeline.watches(to)):
            self._network.transfer(source, to, nbytes, sent, arrived)
            return
        start = self._time.now()

        def noted() -> None:
            self._timeline.send(Sending(source, to, nbytes, start, self._time.now()))
            sent()

        self._network.transfer(source, to, nbytes, noted, arrived)

    def alpha_s(self, source: int, to: int) -> float:
        """Return α of the way from one global rank to another."""
        return self._network.alpha_s(source, to)
