"""`Log` and `form`: cases by hand, all reports of three workers, and all interleavings of a few workers' moves.

`Model` is a network of workers with nothing but their logs. It opens entries, sums up, hands over, kills at any moment
and lets a newcomer in, in every order there is (breadth first, each state once).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

import sample
from polyrhythm.communication.log import Log, Report, Result, form

R = Result(None, 1.0, False)


# by hand


def test_a_result_of_a_group_is_handed_within_the_group_alone() -> None:
    """Of 0 and 1 only 1 has the mean of entry 1; 2 and 3 have theirs, have gone on, and 3 is lost."""
    common = {"apart": (1, 2), "group": 2}
    reports = {
        0: Report(steps=4, merged=1, have=(0,), **common),
        1: Report(steps=4, merged=1, have=(0, 1), **common),
        2: Report(steps=5, merged=2, have=(0,), **common),
    }
    found = form(reports)
    assert found is not None
    assert (found.newest, found.gives) == (2, ())
    assert found.hands == ((1, 1, 0),)


def test_a_newcomer_is_given_the_state_of_its_own_group() -> None:
    common = {"apart": (1,), "group": 2}
    reports = {
        0: Report(),
        1: Report(steps=4, merged=1, have=(0,), **common),
        2: Report(steps=5, merged=2, have=(0,), **common),
    }
    found = form(reports)
    assert found is not None
    assert (found.newest, found.gives) == (2, ((1, 0),))
    alone = form({0: Report(), 2: reports[2]})
    assert alone is not None
    assert alone.gives == ((2, 0),)


def test_who_drops_a_result_of_its_group_notes_that_there_was_one() -> None:
    log = Log()
    for apart in (False, True, True, False):
        entry = log.open(apart=apart)
        log.complete(entry, R)
        log.merge(entry)
        if apart:
            assert 0 in log.kept, "another group may lack the result of all"
    assert (list(log.kept), log.apart) == ([3], ())
    entry = log.open(apart=True)
    log.complete(entry, R)
    log.merge(entry)
    following = log.open(apart=True)
    log.complete(following, R)
    assert (list(log.kept), log.apart) == ([3, 5], (4, 5))


# all possible reports of three workers: each fresh, suspended, between steps, or over


def possible(most: int) -> list[Report]:
    found = [Report()]
    for merged in range(most + 1):
        kept = (merged - 1,) if merged else ()
        for steps, over in itertools.product((2 * merged, 2 * merged + 1), (False, True)):
            found.append(Report(steps=steps, merged=merged, have=kept, over=over, since=2 * merged))
            found.append(
                Report(steps=steps, merged=merged, have=(*kept, merged), over=over, since=2 * merged)
            )
    return found


def test_all_reports_of_three_workers() -> None:
    tried = 0
    for told in itertools.product(possible(2), repeat=3):
        reports = dict(enumerate(told))
        olds = {worker: each for worker, each in reports.items() if not each.fresh}
        found = form(reports)
        if not olds:
            assert found is None
            continue
        tried += 1
        assert found is not None
        assert found.members == (0, 1, 2)
        assert found.newest in olds
        best = olds[found.newest]
        assert all(
            (each.over, each.steps, each.merged) <= (best.over, best.steps, best.merged)
            for each in olds.values()
        )
        furthest = max(each.merged for each in olds.values())
        has = {worker: set(each.have) for worker, each in olds.items()}
        merged = {worker: each.merged for worker, each in olds.items()}
        for worker in found.takes:
            has[worker], merged[worker] = set(best.have), best.merged
        everything = set().union(*(each.have for each in olds.values()))
        for number, giver, taker in found.hands:
            assert number in olds[giver].have
            assert number not in has[taker]
            assert number >= merged[taker]
            has[taker].add(number)
        for worker in found.members:
            # No member lacks a result that another has, or has merged.
            assert all(number in has[worker] for number in everything if number >= merged[worker])
            if best.merged == furthest:
                assert all(number in has[worker] for number in range(merged[worker], furthest))
        assert set(found.takes) >= reports.keys() - olds.keys()
    assert tried > 10_000


# all interleavings


class Worker:
    def __init__(self, log: Log | None) -> None:
        self.alive, self.log, self.past = True, log, ()  # past: results merged
        self.frozen, self.ready, self.lacks = False, True, frozenset()  # lacks: of the view that is adopted

    def copy(self) -> Worker:
        made = copy.copy(self)
        made.__dict__.pop("key", None)
        if self.log is not None:
            made.log = copy.copy(self.log)
            made.log._entries = {number: copy.copy(entry) for number, entry in self.log._entries.items()}
        return made

    @cached_property  # a worker changes only as a copy, before it is asked
    def key(self) -> Any:
        log = self.log
        told = (
            None
            if log is None
            else (
                log.merged,
                log.opened,
                tuple(sorted((k, r.vector) for k, r in log.kept.items())),
                log.apart,
            )
        )
        return self.alive, told, self.past, self.frozen, self.ready, self.lacks


class Model:
    """A few workers and entries; results are told apart by who brought something.

    With a depth of 2, an entry is merged only before the one after the next is opened: two are under way at once.
    """

    def __init__(
        self, workers: int, entries: int, deaths: int, joins: int, depth: int = 1, group: int = 0
    ) -> None:
        self.depth, self.group = depth, group
        self.workers = [Worker(Log()) for _ in range(workers)]
        self.entries, self.deaths, self.joins = entries, deaths, joins
        self.members, self.broken = tuple(range(workers)), False
        self.brought: frozenset = frozenset()  # of this view: (entry, worker)
        self.number = 0

    @property
    def key(self) -> Any:
        return (
            tuple(w.key for w in self.workers),
            self.members,
            self.broken,
            self.brought,
            self.deaths,
            self.joins,
        )

    def copy(self, move: tuple[Any, ...]) -> Model:
        """Return a copy in which those workers are copies that the move changes."""
        made = copy.copy(self)
        changes = move[1:2] or range(len(self.workers))
        made.workers = [w.copy() if number in changes else w for number, w in enumerate(self.workers)]
        return made

    def moves(self) -> Iterator[tuple[Any, ...]]:
        for i, w in enumerate(self.workers):
            if not w.alive:
                continue
            if self.deaths:
                yield "die", i
            if w.frozen:
                continue
            if w.log is None or not w.ready or w.log.under_way is not None:
                if self.broken or i not in self.members:
                    yield "report", i
            elif w.log.merged < self.entries:
                yield "open", i
            elif self.broken:
                yield "report", i  # it has done all its steps, and waits for permission to leave
            if self.depth > 1 and w.log is not None and w.ready and w.log.under_way is not None:
                if w.log.opened < min(self.entries, w.log.merged + self.depth):
                    yield "open", i
                full = w.log.opened == min(self.entries, w.log.merged + self.depth)
                if w.log.under_way.result is not None and full:
                    yield "merge", i
            if w.lacks and w.ready is False:
                for hand in sorted(w.lacks, key=str):
                    giver = self.workers[hand[1]]  # its successor has no log before the next view
                    if giver.alive and giver.log is not None and (w.log is not None or hand[0] is None):
                        yield "hand", i, hand
            if w.log is not None and w.ready:
                for k in range(w.log.merged, w.log.opened):
                    if k not in w.log.kept and all((k, m) in self.brought for m in self.meeting(k, i)):
                        yield "sum", i, k
        if self.joins and any(not w.alive for w in self.workers):
            yield ("join",)
        alive = [w for w in self.workers if w.alive]
        if self.broken and alive and all(w.frozen for w in alive):
            yield ("form",)

    def apart(self, entry: int) -> bool:
        return self.group > 0 and entry % 3 < 2  # two means of groups, then one of all

    def meeting(self, entry: int, worker: int) -> list[int]:
        """Return who of the members takes part in this worker's exchange."""
        apart, size = self.apart(entry), self.group
        return [m for m in self.members if not apart or m // size == worker // size]

    def play(self, move: tuple[Any, ...]) -> bool:
        kind, *rest = move
        w = self.workers[rest[0]] if rest else None
        if kind == "die":
            w.alive, self.deaths, self.broken = False, self.deaths - 1, True
        elif kind == "open":
            entry = w.log.open(apart=self.apart(w.log.opened))
            self.bring_or_merge(rest[0], entry)
        elif kind == "sum":
            entry = w.log._entries[rest[1]]
            counts = tuple(m for m in self.meeting(*rest[::-1]) if (entry.number, m) in self.brought)
            w.log.complete(entry, Result((entry.number, self.number, counts), 1.0, False))
            if self.depth == 1:
                self.merge(w, entry)
        elif kind == "merge":
            self.merge(w, w.log.under_way)
        elif kind == "report":
            w.frozen = True
        elif kind == "join":
            i = next(i for i, w in enumerate(self.workers) if not w.alive)
            self.workers[i] = Worker(None)
            self.workers[i].frozen, self.joins, self.broken = True, self.joins - 1, True
        elif kind == "form":
            return self.form()
        elif kind == "hand":
            k, giver, _ = rest[1]
            w.lacks -= {rest[1]}
            given = self.workers[giver]
            if k is None:
                w.log, w.past = Log(), given.past[: given.log.merged]
                w.log.load(given.log.merged, given.log.kept, given.log.apart)
                for _ in range(given.log.opened - given.log.merged if self.depth > 1 else 0):
                    w.log.open()  # it takes part in entries under way, with nothing to contribute
            else:
                w.log.take(k, given.log.kept[k])
            self.settle(rest[0])
        return True

    def merge(self, w: Worker, entry: Any) -> None:
        w.past += (w.log.merge(entry).vector,)

    def bring_or_merge(self, i: int, entry: Any) -> None:
        if entry.result is not None:
            if self.depth == 1:
                self.merge(self.workers[i], entry)
        elif self.workers[i].ready:
            self.brought |= {(entry.number, i)}

    def settle(self, i: int) -> None:
        w = self.workers[i]
        if not w.lacks:
            w.ready = True
            for k in range(w.log.merged, w.log.opened):
                self.bring_or_merge(i, w.log._entries[k])

    def form(self) -> bool:
        reports = {}
        for i, w in enumerate(self.workers):
            if w.alive:
                told = (
                    Report()
                    if w.log is None
                    else Report(
                        steps=w.log.merged,
                        merged=w.log.merged,
                        have=tuple(w.log.kept),
                        apart=w.log.apart,
                        group=self.group,
                    )
                )
                reports[i] = told
        found = form(reports)
        if found is None:
            return False
        assert all(reports[i].fresh for i in found.takes), (
            "results that are kept are enough for every worker with a state"
        )
        self.members, self.broken, self.brought = found.members, False, frozenset()
        self.number += 1
        lacks = {i: set() for i in found.members}
        for giver, taker in found.gives:
            lacks[taker].add((None, giver, taker))
        for hand in found.hands:
            lacks[hand[2]].add(hand)
        for i in found.members:
            w = self.workers[i]
            w.frozen, w.ready, w.lacks = False, False, frozenset(lacks[i])
        for i in found.members:
            self.settle(i)
        return True

    def check(self) -> None:
        pasts = [(i, w.past) for i, w in enumerate(self.workers) if w.alive and w.log is not None]
        for (i, one), (j, other) in itertools.combinations(pasts, 2):
            near = not self.group or i // self.group == j // self.group
            both = [k for k in range(min(len(one), len(other))) if near or not self.apart(k)]
            assert all(one[k] == other[k] for k in both), "two results of one entry"


# workers, entries, deaths, newcomers, entries under way, workers of a group
CASES = [
    (2, 3, 2, 2, 1),
    (3, 2, 2, 0, 1),
    (3, 2, 1, 1, 1),
    (3, 1, 2, 1, 1),
    (3, 2, 2, 1, 1),
    (3, 3, 1, 1, 1, 2),
    (4, 3, 1, 0, 1, 2),
    (2, 4, 2, 1, 2),
    (3, 2, 1, 1, 2),
]


@pytest.mark.parametrize("case", CASES if sample.whole else CASES[:6], ids=str)
def test_all_interleavings_end_with_one_history(case: tuple[int, ...]) -> None:
    first = Model(*case)
    entries = first.entries
    seen, front, ends = {first.key}, [first], 0
    while front:
        following = []
        for model in front:
            moves = list(model.moves())
            if not moves or all(move[0] in ("die", "join") for move in moves):
                alive = [w for w in model.workers if w.alive]
                assert all(w.log is not None and w.log.merged == entries for w in alive), "no move is left"
                ends += 1
            for move in moves:
                made = model.copy(move)
                if not made.play(move):
                    continue
                made.check()
                if (key := made.key) not in seen:
                    seen.add(key)
                    following.append(made)
        front = following
    assert ends
