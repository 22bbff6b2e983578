"""The log of the exchanges of synchronous workers, and the view that follows from their reports when one fails.

All members of a view open the same entries in the same order. An entry is opened, gets its result (from a sum, or from
another worker that has it), and is merged into this worker's state.

    merged ▔▔▔▔▔▔▔▔▔▔▔▔▔▔╮
    0   1   2   3   4   5 ┆ 6   7          5: result kept, since another may lack it;  6: pending;  7: received early
                    └ base: all have merged the entries below

A result is dropped when a later entry is complete to which every worker contributed after it had merged that result.
The number of merged entries when an entry is opened is the same on all workers, so no message carries it: a worker that
holds the result of an entry knows that all have merged the entries below its base.

Where groups of neighboring workers also exchange internally, all workers open an entry for such an exchange, and each
group has its own result. It is sent only within the group. A worker that drops it records that the entry existed.

`form` determines the view that follows a failed one, from the reports of all connected workers:

    some hold a result            they send it to the workers that lack it: the same bits, and nothing is recomputed
    no worker holds it            no live worker has merged it: all contribute again
    a worker lacks the state,     the most advanced worker sends its state
    or a result that was dropped
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NO_STATE = -1
MODELS, NEWEST = -1, -2
"""Values of `Entry.aside`: the current models are exchanged; the servers' newest parameters are handed out."""


class Result(NamedTuple):
    """The result of an exchange.

    Attributes:
        vector: result, `(n,)`, in separate memory; None: all contributions had weight 0, or the sum is in place.
        weight: sum of the weights of all contributions.
        stop: whether any worker received a stop request.
    """

    vector: Tensor | None
    weight: float
    stop: bool


@dataclass(slots=True)
class Entry:
    """One exchange of this worker.

    Attributes:
        number: index of the entry; the same on all workers.
        base: number of entries that this worker had merged when it opened this one; the same on all workers.
        result: result of the exchange; None while it is pending.
        aside: payload of an exchange outside a step, in which a joining worker takes part at once: the length of a
            vector, `MODELS` or `NEWEST`; 0 for exchanges of a step.
        apart: whether each group of neighboring workers has its own result.
    """

    number: int
    base: int
    result: Result | None = None
    aside: int = 0
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Progress of a worker: the coordinator's input for the next view.

    Attributes:
        steps: number of steps done; negative: the worker holds no state.
        merged: number of entries merged into its state.
        opened: number of entries that it has opened.
        since: number of steps done when the latest entry was merged; a failed worker's updates after it are lost.
        have: numbers of the entries with a result on this worker.
        apart: numbers of the entries with one result per group.
        group: number of workers of a group of neighbors; 0: there are no groups.
        inside: whether it waits for the result of an entry of its current step.
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
        members: workers of the next view, in ascending order.
        newest: the most advanced worker.
        gives: transfers of states: (sender, receiver).
        hands: transfers of results: (number of the entry, sender, receiver).
        begins: the first entry that no member had opened: values derived from the members apply from it on.
    """

    members: tuple[int, ...]
    newest: int
    gives: tuple[tuple[int, int], ...] = ()
    hands: tuple[tuple[int, int, int], ...] = ()
    begins: int = 0

    @property
    def takes(self) -> tuple[int, ...]:
        """Members that receive a state."""
        return tuple(taker for _, taker in self.gives)


def form(reports: Mapping[int, Report]) -> Formed | None:
    """Return the next view; None: no worker has a state.

    All workers that report are suspended, and no exchange of the old view completes any more.

    Args:
        reports: reports of the remaining members and of joining workers, by worker index.
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
        report = olds[givers.get(worker, worker)]  # a state is sent with the results of its sender
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
    def progress(worker: int) -> tuple[bool, int, int, int, int]:
        report = reports[worker]
        return report.over, report.steps, report.merged, report.opened, -worker

    return max(reports, key=progress)


class Log:
    """The log of one worker.

    Attributes:
        merged: number of entries merged into its state.
        opened: number of entries that it has opened.
    """

    def __init__(self) -> None:
        self.merged = self.opened = self._first = 0
        self._entries: dict[int, Entry] = {}  # none has a number below `_first`

    def open(self, *, aside: int = 0, apart: bool = False) -> Entry:
        """Open and return the next entry; its result may have been received already.

        Args:
            aside: see `Entry`.
            apart: see `Entry`.
        """
        entry = self._entries.get(self.opened)
        if entry is None:
            entry = self._entries[self.opened] = Entry(self.opened, self.merged)
        entry.base, entry.aside, entry.apart = self.merged, aside, apart
        self.opened += 1
        return entry

    def complete(self, entry: Entry, result: Result) -> None:
        """Set the result of a sum to which all members, or all members of this worker's group, have contributed."""
        entry.result = result
        if entry.apart:  # other groups may not have merged their results
            for other in self._entries.values():
                if other.apart and other.number < entry.base:
                    other.result = None
        else:
            self._drop(entry.base)

    def take(self, number: int, result: Result) -> None:
        """Set a result received from another worker, of an entry that is pending or not yet opened."""
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
        """Discard the pending entries: their step is repeated."""
        self._drop(self.merged)
        for number in range(self.merged, self.opened):
            del self._entries[number]
        self.opened = self.merged

    @property
    def under_way(self) -> Entry | None:
        """The first pending entry: opened and not merged; None if there is none."""
        return self._entries[self.merged] if self.merged < self.opened else None

    @property
    def kept(self) -> dict[int, Result]:
        """All results, by the number of the entry."""
        return {number: entry.result for number, entry in self._entries.items() if entry.result is not None}

    @property
    def apart(self) -> tuple[int, ...]:
        """Numbers of the entries with one result per group, including pending ones."""
        return tuple(number for number, entry in self._entries.items() if entry.apart)

    def load(self, merged: int, kept: Mapping[int, Result], apart: Collection[int] = ()) -> None:
        """Replace the log by a copy of another worker's.

        Args:
            merged: number of entries merged there.
            kept: results kept there, by number of the entry.
            apart: numbers of the entries with one result per group there.
        """
        self.merged = self.opened = merged
        numbers = {*kept, *(number for number in apart if number < merged)}
        self._entries = {
            number: Entry(number, 0, kept.get(number), apart=number in apart) for number in numbers
        }
        self._first = min(numbers, default=merged)

    def reopen(self, entry: Entry) -> None:
        """Keep a pending entry open after `load`, if it is the next one of the loaded log."""
        if entry.number == self.merged:
            known = self._entries.get(entry.number)
            entry.base, entry.result = self.merged, None if known is None else known.result
            self._entries[entry.number] = entry
            self.opened = entry.number + 1

    def _drop(self, base: int) -> None:
        for number in range(self._first, base):
            self._entries.pop(number, None)
        self._first = max(self._first, base)
