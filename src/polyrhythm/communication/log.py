"""The log of the exchanges of workers in lockstep, and the view that follows from their reports when one is lost.

All members of a view open the same entries in the same order. An entry is opened, gets its result (from a sum, or from
another worker that has it), and is merged into this worker's state.

    merged ▔▔▔▔▔▔▔▔▔▔▔▔▔▔╮
    0   1   2   3   4   5 ┆ 6   7          5: result kept, since another may lack it;  6: under way;  7: handed already
                    └ base: all have merged the entries below

A result is dropped when a later entry is complete to which every worker contributed after it had merged that result.
How much a worker had merged when it opened an entry is the same on all, so no message carries it: a worker that holds
the result of an entry knows that all have merged the entries below its base.

Where neighbouring workers also meet among themselves, all open an entry at such a meeting, and each group has a result
of its own. It is handed on within the group. Who drops it notes that there was one.

`form` decides how a view that broke goes on, from the reports of all workers that are connected:

    some hold a result            they hand it to the workers that lack it: the same bits, and nothing is computed again
    nobody holds it               nobody alive has seen it: all contribute again
    a worker lacks the state,     the worker that has come furthest hands over its state
    or a result that nobody kept
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NO_STATE = -1
MODELS = -1
"""The models, as they are."""


class Result(NamedTuple):
    """The result of an exchange.

    Attributes:
        vector: `(n,)`, in memory of its own; None: no contribution had any weight, or the sum was made in place.
        weight: of all contributions together.
        stop: whether any worker was asked to stop.
    """

    vector: Tensor | None
    weight: float
    stop: bool


@dataclass(slots=True)
class Entry:
    """One exchange of this worker.

    Attributes:
        number: the same on all workers.
        base: entries that this worker had merged when it opened this one; the same on all workers.
        result: None while the exchange is under way.
        aside: what is exchanged, if it is no part of a step, so that a newcomer takes part at once: the length of a
            vector, or `MODELS`; else 0.
        apart: whether each group of neighbours has a result of its own.
    """

    number: int
    base: int
    result: Result | None = None
    aside: int = 0
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """How far a worker has come: all that the leader needs to know of it to make the next view.

    Attributes:
        steps: done; negative: the worker holds no state.
        merged: entries that are in its state.
        opened: entries that it has opened.
        since: steps done when the latest of them was merged: what a lost worker did after that is gone.
        have: numbers of the entries whose results it holds.
        apart: numbers of the entries of which each group has a result of its own.
        group: neighbouring workers of a group; 0: there are no groups.
        inside: whether it waits for the result of an entry of the step that it is in.
        over: whether it has done all its steps.
    """

    steps: int = NO_STATE
    merged: int = 0
    opened: int = 0
    since: int = 0
    have: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()
    group: int = 0
    inside: bool = False
    over: bool = False

    @property
    def fresh(self) -> bool:
        """Whether the worker holds no state."""
        return self.steps == NO_STATE


@dataclass(frozen=True)
class Formed:
    """The view that follows from reports.

    Attributes:
        members: workers that go on, in order.
        newest: the worker that has come furthest.
        gives: states to pass on: the worker that has it, the worker that begins with it.
        hands: results to pass on: number of the entry, the worker that has it, the worker that lacks it.
        begins: the first entry that no member had opened: what follows from the members begins with it.
    """

    members: tuple[int, ...]
    newest: int
    gives: tuple[tuple[int, int], ...] = ()
    hands: tuple[tuple[int, int, int], ...] = ()
    begins: int = 0

    @property
    def takes(self) -> tuple[int, ...]:
        """Members that are given a state."""
        return tuple(taker for _, taker in self.gives)


def form(reports: Mapping[int, Report]) -> Formed | None:
    """Return the next view; None: no worker has a state.

    All workers that report are suspended, and no exchange of the old view completes any more.

    Args:
        reports: of the members that are left, and of newcomers, by the workers' indices.
    """
    olds = {worker: report for worker, report in sorted(reports.items()) if not report.fresh}
    if not olds:
        return None
    newest = _newest(olds)
    size, furthest = olds[newest].group, max(report.merged for report in olds.values())
    apart = {number for report in olds.values() for number in report.apart}

    def group(worker: int) -> int:
        return worker // size if size else 0

    def scope(number: int, worker: int) -> tuple[int, int | None]:
        return number, group(worker) if number in apart else None

    holders: dict[tuple[int, int | None], int] = {}
    for worker, report in olds.items():
        for number in report.have:
            holders.setdefault(scope(number, worker), worker)
    givers: dict[int, int] = {}
    for worker, report in olds.items():
        lacks = (number for number in range(report.merged, furthest) if number not in apart)
        if any((number, None) not in holders for number in lacks):
            givers[worker] = newest
    for worker in reports.keys() - olds.keys():
        near = {old: report for old, report in olds.items() if group(old) == group(worker)}
        givers[worker] = _newest(near or olds)
    hands = []
    for worker in sorted(reports):
        report = olds[givers.get(worker, worker)]  # a state comes with the results that its worker holds
        hands += [
            (number, giver, worker)
            for number in sorted({number for number, _ in holders})
            if number >= report.merged
            and number not in report.have
            and (giver := holders.get(scope(number, worker))) is not None
        ]
    begins = max(max(report.opened, report.merged) for report in olds.values())
    gives = tuple((giver, taker) for taker, giver in sorted(givers.items()))
    return Formed(tuple(sorted(reports)), newest, gives, tuple(hands), begins)


def _newest(reports: Mapping[int, Report]) -> int:
    def progress(worker: int) -> tuple[bool, int, int, int]:
        report = reports[worker]
        return report.over, report.steps, report.merged, -worker

    return max(reports, key=progress)


class Log:
    """The log of one worker.

    Attributes:
        merged: entries that are in its state.
        opened: entries that it has opened.
    """

    def __init__(self) -> None:
        self.merged = self.opened = 0
        self._entries: dict[int, Entry] = {}

    def open(self, *, aside: int = 0, apart: bool = False) -> Entry:
        """Open the next entry; its result may be there already.

        Args:
            aside: see `Entry`.
            apart: likewise.
        """
        entry = self._entries.get(self.opened)
        if entry is None:
            entry = self._entries[self.opened] = Entry(self.opened, self.merged)
        entry.base, entry.aside, entry.apart = self.merged, aside, apart
        self.opened += 1
        return entry

    def complete(self, entry: Entry, result: Result) -> None:
        """Note the result of a sum to which all members have contributed, or those of this worker's group."""
        entry.result = result
        if entry.apart:  # others may not have merged what this group has
            for other in self._entries.values():
                if other.apart and other.number < entry.base:
                    other.result = None
        else:
            self._drop(entry.base)

    def take(self, number: int, result: Result) -> None:
        """Note a result that another worker hands over, of an entry that is under way or still to be opened."""
        if number >= self.merged:
            self._entries.setdefault(number, Entry(number, self.merged)).result = result

    def merge(self, entry: Entry) -> Result:
        """Return the result of an entry, and count it as part of this worker's state; it is kept for others."""
        assert entry.result is not None, "an entry is merged when its result is there"
        assert entry.number == self.merged, "entries are merged in their order"
        self.merged += 1
        return entry.result

    def forget(self) -> None:
        """Drop the results of merged entries: no worker will ask for them."""
        self._drop(self.merged)

    def give_up(self) -> None:
        """Give up the entries under way: their step begins again."""
        self._drop(self.merged)
        for number in range(self.merged, self.opened):
            del self._entries[number]
        self.opened = self.merged

    @property
    def under_way(self) -> Entry | None:
        """The first entry that is opened and not merged."""
        return self._entries[self.merged] if self.merged < self.opened else None

    @property
    def kept(self) -> dict[int, Result]:
        """All results, by the number of the entry."""
        return {number: entry.result for number, entry in self._entries.items() if entry.result is not None}

    @property
    def apart(self) -> tuple[int, ...]:
        """Numbers of the entries, those under way among them, of which each group has a result of its own."""
        return tuple(number for number, entry in self._entries.items() if entry.apart)

    def load(self, merged: int, kept: Mapping[int, Result], apart: Collection[int] = ()) -> None:
        """Begin as another worker that has merged so many entries, keeps these results, and knows these `apart`."""
        self.merged = self.opened = merged
        numbers = {*kept, *(number for number in apart if number < merged)}
        self._entries = {
            number: Entry(number, 0, kept.get(number), apart=number in apart) for number in numbers
        }

    def _drop(self, base: int) -> None:
        entries = self._entries
        if entries and min(entries) < base:
            for number in [number for number in entries if number < base]:
                del entries[number]
