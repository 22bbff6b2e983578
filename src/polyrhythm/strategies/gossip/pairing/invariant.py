"""The invariant of AD-PSGD: every question has one answer, and no average or update is lost or doubled.

Both follow from the messages alone. A worker that answers with half a difference d to parameters x shows its
own, x - 2d before and x - d after; from one answer to the next they change by its own gradients only. A
worker that asks changes by the answers it was given and by its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.gossip.pairing.keeper import Place, place_of
from polyrhythm.strategies.invariant import Conditions, Delivered, Ended, Invariant, Stepped, Violation
from polyrhythm.strategies.topology import Topology

_Who = tuple[int, int]
"""A rank and its incarnation."""

_TOLERANCE = 1e-4
"""Of sums in float32, relative to the largest number; a gradient or difference that is lost or doubled is far more."""


@dataclass(frozen=True)
class _Question:
    to: _Who
    values: Tensor


@dataclass
class _Known:
    """What is known of an incarnation.

    Attributes:
        base: `(n,)`, its parameters but for gradients, as far as they are followed; None if they are not known.
        from_step: the first step whose gradient is not in `base`.
        answers: by its count of averages: the step it was in, its parameters before and after.
    """

    base: Tensor | None
    from_step: int = 0
    answers: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)


class Exchanges(Invariant):
    """Questions and answers between workers of two colours.

    Args:
        conditions: without known gradients, only questions and answers are counted.
        topology: who may ask whom.
    """

    def __init__(self, conditions: Conditions, topology: Topology) -> None:
        workers = conditions.cast.workers
        self._places = {rank: place_of(topology, workers, index) for index, rank in enumerate(workers)}
        self._workers = workers
        self._gradient = conditions.gradient
        self._numbers = conditions.numbers
        self._open: dict[_Who, list[_Question]] = {}
        self._known: dict[_Who, _Known] = {}
        self._latest = dict.fromkeys(workers, 0)

    def delivered(self, event: Delivered) -> None:
        """Follows a question or an answer; what a worker says to itself is its own business."""
        self._latest[event.source] = max(self._latest[event.source], event.source_incarnation)
        if event.source == event.to or event.message.kind not in (Kind.VECTOR, Kind.DIFFERENCE):
            return
        if event.message.kind is Kind.VECTOR:
            self._asked(event)
        else:
            self._answered(event)

    def _asked(self, event: Delivered) -> None:
        place: Place = self._places[event.source]
        who = event.source, event.source_incarnation
        if not place.active or event.to not in place.partners:
            raise Violation(
                f"a question to rank {event.to}",
                rank=event.source,
                time_s=event.time_s,
                expected=f"one to {place.partners}" if place.active else "none of a passive worker",
                found=f"one of step {event.message.step}",
            )
        assert event.message.tensor is not None, "who asks sends its parameters"
        question = _Question((event.to, event.to_incarnation), event.message.tensor.double())
        self._open.setdefault(who, []).append(question)

    def _answered(self, event: Delivered) -> None:
        asker = event.to, event.to_incarnation
        answerer = event.source, event.source_incarnation
        questions = self._open.pop(asker, [])  # all but the last went to workers that were lost
        if not questions or questions[-1].to != answerer:
            raise Violation(
                f"an answer of rank {event.source}",
                rank=event.to,
                time_s=event.time_s,
                expected=f"one of rank {questions[-1].to[0]}, which was asked last" if questions else "none",
                found=f"one of step {event.message.step}",
            )
        if event.message.tensor is None or self._gradient is None:
            return
        half = event.message.tensor.double()
        mine = self._of(asker)
        if mine.base is not None:
            mine.base = mine.base - half
        sent = questions[-1].values
        self._follow(event, sent - 2 * half, sent - half)

    def _follow(self, event: Delivered, before: Tensor, after: Tensor) -> None:
        """Compares what two successive answers show of who gave them."""
        theirs = self._of((event.source, event.source_incarnation))
        number = event.message.version
        theirs.answers[number] = event.message.step, before, after
        for later in (number, number + 1):
            if later in theirs.answers and later - 1 in theirs.answers:
                step, shown, _ = theirs.answers[later]
                from_step, _, left = theirs.answers.pop(later - 1)
                expected = left - self._gradients(event.source, from_step, step)
                self._compare(event.source, event.time_s, f"what answer {later} shows", shown, expected)

    def stepped(self, event: Stepped) -> None:
        """Compares the parameters of a worker that asks."""
        if self._gradient is None or not self._places[event.rank].active:
            return
        known = self._of((event.rank, self._latest[event.rank]))
        found = event.vector.double()
        if known.base is not None:
            gradients = self._gradients(event.rank, known.from_step, event.step + 1)
            what = f"parameters after step {event.step}"
            self._compare(event.rank, event.time_s, what, found, known.base - gradients)
        known.base, known.from_step = found, event.step + 1

    def ended(self, event: Ended) -> None:
        """Nobody who has left still waits for an answer."""
        for (rank, incarnation), questions in self._open.items():
            asked, asked_incarnation = questions[-1].to
            alive = {rank, asked} <= {*event.survivors}
            if alive and (incarnation, asked_incarnation) == (self._latest[rank], self._latest[asked]):
                raise Violation(
                    f"a question to rank {asked}",
                    rank=rank,
                    time_s=event.time_s,
                    expected="an answer before the end",
                    found="none",
                )

    def _of(self, who: _Who) -> _Known:
        if who not in self._known:
            # The first of a rank begins with zeros; a successor with what its first step shows.
            self._known[who] = _Known(torch.zeros(self._numbers).double() if who[1] == 0 else None)
        return self._known[who]

    def _gradients(self, rank: int, from_step: int, to_step: int) -> Tensor:
        assert self._gradient is not None
        total = torch.zeros(self._numbers, dtype=torch.float64)
        for step in range(from_step, to_step):
            total += self._gradient(self._workers.index(rank), step).double()
        return total

    def _compare(self, rank: int, time_s: float, what: str, found: Tensor, expected: Tensor) -> None:
        error = float((found - expected).abs().max())
        if error > _TOLERANCE * (1 + float(expected.abs().max())):
            raise Violation(
                what,
                rank=rank,
                time_s=time_s,
                expected="its parameters, changed by its gradients and by what it was answered",
                found=f"numbers that differ by up to {error:g}",
            )
