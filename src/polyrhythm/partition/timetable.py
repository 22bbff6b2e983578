"""When every unit of a schedule runs, from the times that units and messages take: makespan, idle time, memory.

    a unit starts when its rank has done all before it, and what it waits for has been computed and sent
    what a rank sends leaves in the order of its units, one after the other

As the ranks themselves do it, so that a pipeline's time is known beforehand, contention between ranks aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyrhythm.partition.schedule import Schedule, Unit


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    Attributes:
        forward: of a unit F.
        backward: of a unit B; where the schedule splits the backward pass, of that for inputs.
        weights: of a unit W.
        send: of its outputs to the next stage, while nothing else leaves; their gradients take as long.
        latency: from a message's last byte leaving until it has come.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    send: float = 0.0
    latency: float = 0.0

    def of(self, unit: Unit) -> float:
        """Return the seconds of a unit."""
        return {"F": self.forward, "B": self.backward, "W": self.weights}[unit.kind]


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
        ranks: of every rank, in order.
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
        """Return of how many microbatches and chunks a rank keeps activations at once.

        Args:
            rank: its number.
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
        times: of the stages, by their numbers; chunk c of rank k is stage c K + k.
        copies: of every rank's stage, among which microbatches are dealt out; a row of the timetable each, in order.
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
                end = start + of_stage(stage).of(unit)
                ended[unit.kind, stage, unit.microbatch] = end
                between = stage if unit.kind == "F" else stage - 1  # number of the cut that it sends over
                if unit.kind != "W" and 0 <= between < stages - 1:
                    over = of_stage(between)
                    # What is sent waits for what left before it, not the rank for what it sends.
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
