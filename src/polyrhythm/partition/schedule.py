"""Schedules of a pipeline: in which order each rank computes forward and backward passes of microbatches.

    K ranks k = 0 …, M microbatches, and v chunks (stages) a rank; chunk c of rank k is stage c K + k of the network

    unit    computes                                       waits for
    F       a chunk's forward pass                         F of the stage before
    B       its backward pass, or that for its inputs      B of the stage behind; F of its own in the last stage
    W       where that is split off, that for its weights  B of its own

A schedule with a flush ends with every batch: parameters are updated between two batches, and the result is
that of one rank. One without continues: units of the next batch follow at once, and are computed with
parameters that lack some updates.

A timetable computes when every unit runs, from the times that units and messages take, so makespan, idle time
and memory:

    a unit starts when its rank has done all before it, and what it waits for has been computed and sent
    what a rank sends leaves in the order of its units, one after the other

As the ranks themselves do it, so that a pipeline's time is known beforehand, contention between ranks aside.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

SCHEDULES = "polyrhythm.partition.schedules"
"""The folder of choices."""


class Unit(NamedTuple):
    """Uninterrupted computation of a rank.

    Attributes:
        kind: F, B or W.
        microbatch: number of the microbatch.
        chunk: chunk of the rank's.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0


class Schedule(Config):
    """An order of units.

    Attributes:
        flushes: whether a batch is over before parameters are updated; else see `updates_every` and `version`.
        splits_backward: whether there are units W.
        forward_first: whether all forward passes of a batch precede its backward passes.
        deals_out: whether stages may have different numbers of copies, among which microbatches are dealt out.
    """

    flushes: ClassVar[bool] = True
    splits_backward: ClassVar[bool] = False
    forward_first: ClassVar[bool] = False
    deals_out: ClassVar[bool] = False

    @property
    def chunks(self) -> int:
        """Stages of each rank: v."""
        return 1

    def check(self, ranks: int, microbatches: int) -> None:
        """Refuse numbers that the schedule does not work with.

        Raises:
            RequestError: the schedule does not work with these numbers.
        """

    @abstractmethod
    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        """Yield the units of a rank in their order.

        Args:
            rank: k, from 0.
            ranks: K.
            microbatches: M; without a flush, of all batches together.
        """

    def units_of_copy(self, copies: Sequence[int], rank: int, copy: int, microbatches: int) -> Iterator[Unit]:
        """Yield the units of one of a stage's copies; each takes every r-th microbatch (`deals_out`).

        Narayanan and others, "PipeDream", 2019, section 3.2 (1F1B-RR).

        Args:
            copies: r of every rank's stage.
            rank: k.
            copy: number of the copy.
            microbatches: M.
        """
        own = range(copy, microbatches, copies[rank])
        # A stage of one copy is in the place of as many ranks as there are copies behind it.
        behind = sum(copies) - 1 - sum(copies[:rank])
        first = behind // copies[rank]
        for unit in self.units(0, first + 1, len(own)):
            yield unit._replace(microbatch=own[unit.microbatch])

    def updates_every(self, microbatches: int) -> int:
        """Return after how many microbatches parameters are updated, where there is no flush."""
        return microbatches

    def version(self, microbatch: int, rank: int, ranks: int, microbatches: int) -> int:
        """Return the number of updates contained in a microbatch's parameters, where there is no flush.

        Args:
            microbatch: number of the microbatch since the pipeline was empty.
            rank: k.
            ranks: K.
            microbatches: M, of a batch.
        """
        raise NotImplementedError


def warm_up(rank: int, ranks: int) -> int:
    """Return how many forward passes a rank does before its first backward pass, where each has one stage."""
    return ranks - 1 - rank


def alternating(first: int, count: int) -> Iterator[Unit]:
    """Yield `first` units F, then F and B in turn, then the rest of B, ascending; `count` of both."""
    first = min(first, count)
    yield from (Unit("F", number) for number in range(first))
    for number in range(count - first):
        yield Unit("F", first + number)
        yield Unit("B", number)
    yield from (Unit("B", number) for number in range(count - first, count))


def whole_rounds(ranks: int, microbatches: int, name: str) -> int:
    """Return the number of microbatches of a round: M / max(1, M div K).

    Raises:
        RequestError: the number is not an integer.
    """
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise RequestError(
            f"{name} deals {microbatches} microbatches out in {rounds} rounds, which does not divide: ask for a "
            f"multiple of {ranks} microbatches, or for another schedule"
        )
    return microbatches // rounds


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    Attributes:
        forward: seconds of a unit F.
        backward: seconds of a unit B; where the schedule splits the backward pass, of that for inputs.
        weights: seconds of a unit W.
        send: seconds to send its outputs to the next stage over an idle link; gradients take as long.
        latency: seconds from the departure of a message's last byte to its arrival.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    send: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Span:
    """A unit and when it runs."""

    unit: Unit
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timetable:
    """When all units run.

    Attributes:
        ranks: ranks of every rank, in order.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds until the last unit has ended."""
        return max(spans[-1].end_s for spans in self.ranks if spans)

    def idle_s(self, rank: int) -> float:
        """Return for how long a rank has nothing to do until the last of all has ended."""
        return self.makespan_s - sum(span.end_s - span.start_s for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Idle time of all ranks, over all time."""
        count = len(self.ranks)
        return sum(self.idle_s(rank) for rank in range(count)) / (count * self.makespan_s)

    def live(self, rank: int, until: str = "B") -> int:
        """Return the number of microbatches and chunks with activations that a rank keeps at once.

        Args:
            rank: number of the rank.
            until: the kind of unit after which they are no longer needed: B or W.
        """
        now = most = 0
        for span in self.ranks[rank]:
            now += span.unit.kind == "F"
            most = max(most, now)
            now -= span.unit.kind == until
        return most

    def picture(self, rank: int) -> str:
        """Return a rank's row, a column for each unit of time: `F0 .. B0`."""
        cells: list[str] = []
        for span in self.ranks[rank]:
            cells += [".."] * (round(span.start_s) - len(cells))
            cells.append(f"{span.unit.kind}{span.unit.microbatch}")
        return " ".join(cells)


def timetable(
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    times: Callable[[int], StageTimes] | Sequence[StageTimes],
    copies: Sequence[int] = (),
) -> Timetable:
    """Return when every unit runs.

    Args:
        schedule: the order of each rank's units.
        ranks: K.
        microbatches: M.
        times: times of the stages, by their numbers; chunk c of rank k is stage c K + k.
        copies: copies of every rank's stage, among which microbatches are dealt out; a row of the timetable
            each, in order.
            Empty: one each.
    """
    of_stage = times.__getitem__ if isinstance(times, Sequence) else times
    stages = ranks * schedule.chunks
    if copies:
        rank_of = [rank for rank in range(ranks) for _ in range(copies[rank])]
        orders = [
            list(schedule.units_of_copy(copies, rank, copy, microbatches))
            for rank in range(ranks)
            for copy in range(copies[rank])
        ]
    else:
        rank_of = list(range(ranks))
        orders = [list(schedule.units(rank, ranks, microbatches)) for rank in range(ranks)]
    ended: dict[tuple[str, int, int], float] = {}
    arrived: dict[tuple[str, int, int], float] = {}
    left_at = [0.0] * len(orders)
    found: list[list[Span]] = [[] for _ in orders]
    left = sum(map(len, orders))
    # Each row goes as far as it can, again and again: what a unit waits for may stand in a later row.
    while left:
        before = left
        for row, order in enumerate(orders):
            spans = found[row]
            while len(spans) < len(order):
                unit = order[len(spans)]
                stage = unit.chunk * ranks + rank_of[row]
                ready = _ready_s(unit, stage, stages, ended, arrived)
                if ready is None:
                    break
                start = max(ready, spans[-1].end_s if spans else 0.0)
                own = of_stage(stage)
                end = start + {"F": own.forward, "B": own.backward, "W": own.weights}[unit.kind]
                ended[unit.kind, stage, unit.microbatch] = end
                between = stage if unit.kind == "F" else stage - 1  # number of the cut that it sends over
                if unit.kind != "W" and 0 <= between < stages - 1:
                    over = of_stage(between)
                    # Sends wait for earlier sends; the rank does not wait for its sends.
                    left_at[row] = max(end, left_at[row]) + over.send
                    arrived[unit.kind, stage, unit.microbatch] = left_at[row] + over.latency
                spans.append(Span(unit, start, end))
                left -= 1
        assert left < before, f"the order of {schedule} is a deadlock"
    return Timetable(tuple(tuple(spans) for spans in found))


def _ready_s(
    unit: Unit,
    stage: int,
    stages: int,
    ended: dict[tuple[str, int, int], float],
    arrived: dict[tuple[str, int, int], float],
) -> float | None:
    """Return when what a unit waits for is there; None if that is not known yet."""
    if unit.kind == "F":
        if stage == 0:
            return 0.0
        return arrived.get(("F", stage - 1, unit.microbatch))
    if unit.kind == "W":
        return ended.get(("B", stage, unit.microbatch))
    own = ended.get(("F", stage, unit.microbatch))
    if own is None or stage == stages - 1:
        return own
    at = arrived.get(("B", stage + 1, unit.microbatch))
    return None if at is None else max(own, at)
