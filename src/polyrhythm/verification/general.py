"""Invariants of every strategy, and filters that show an invariant a part of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from polyrhythm.communication.message import Kind
from polyrhythm.verification.invariant import (
    Delivered,
    Ended,
    Handled,
    Invariant,
    Regrouped,
    Stepped,
    Violation,
)


class Progress(Invariant):
    """Virtual time since the last update or step stays within a bound; messages alone are no progress.

    Args:
        patience_s: the bound.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._latest_s = 0.0

    def delivered(self, event: Delivered) -> None:
        quiet_s = event.time_s - self._latest_s
        if quiet_s > self._patience_s:
            raise Violation(
                "messages, but neither an update nor a step",
                event.to,
                event.time_s,
                expected=f"one within {self._patience_s:g} s",
                found=f"none for {quiet_s:g} s",
            )

    def handled(self, event: Handled) -> None:
        if event.version != event.version_before:
            self._latest_s = event.time_s

    def stepped(self, event: Stepped) -> None:
        self._latest_s = event.time_s


class Versions(Invariant):
    """A server's version rises by one with every update, and no worker is answered with an older one than before."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._shown: dict[tuple[int, int, int], int] = {}

    def handled(self, event: Handled) -> None:
        known = self._latest.setdefault(event.server, 0)
        if event.version_before != known or event.version not in (known, known + 1):
            raise Violation(
                "a server's version",
                event.server,
                event.time_s,
                expected=f"{known} and then {known} or {known + 1}",
                found=f"{event.version_before} and then {event.version}",
            )
        self._latest[event.server] = event.version

    def delivered(self, event: Delivered) -> None:
        if event.message.kind is not Kind.PARAMETERS or event.source not in self._latest:
            return
        key = event.source, event.to, event.to_generation
        before = self._shown.get(key, 0)
        if event.message.version < before:
            raise Violation(
                f"the version that rank {event.source} answers with",
                event.to,
                event.time_s,
                expected=f"at least {before}",
                found=event.message.version,
            )
        self._shown[key] = event.message.version


class EveryStep(Invariant):
    """No step is skipped, and none is taken twice by the same generation.

    A step of a worker is a batch. So every sample is seen, unless it belongs to a step of a worker that was lost, from
    the step on that the worker had reached.

    A replacement may repeat steps if their effect was lost with the worker that it replaces. For each lost
    worker, the effect of one step may be known although the step itself never ended. Where workers regroup,
    steps that some member had finished are transferred to the others together with their effect.

    Args:
        workers: ranks of the workers.
        leaves_out: whether a worker may skip steps to catch up with the others.
        regroups: whether workers regroup.
        again: whether workers that regroup may repeat their latest step, if its update was incomplete.
        apart: whether groups regroup by themselves: then a worker receives its group's progress, and the very
            last step may be done though no survivor has reported it.
        skips: whether a replacement begins where the others are, and the steps that they took without it count as done.
        counted: whether every worker takes as many steps as the others.
    """

    def __init__(
        self,
        workers: Collection[int],
        *,
        leaves_out: bool = False,
        regroups: bool = False,
        again: bool = False,
        apart: bool = False,
        skips: bool = False,
        counted: bool = True,
    ) -> None:
        self._counted = counted
        self._apart = apart
        self._skips = skips
        self._again = again
        self._views: dict[int, str | int | None] = dict.fromkeys(workers)
        self._leaves_out = leaves_out
        self._regroups = regroups
        self._reached = dict.fromkeys(workers, 0)
        self._generations = dict.fromkeys(workers, 0)

    def stepped(self, event: Stepped) -> None:
        expected = self._reached[event.rank]
        lost = event.generation - self._generations[event.rank]
        first, last = (0 if lost else expected), expected + lost
        if self._again and event.view != self._views[event.rank]:
            first = min(first, expected - 1)
        self._views[event.rank] = event.view
        bounded = not (self._leaves_out or (self._skips and lost)) and event.regrouped is None
        if event.step < first or (event.step > last and bounded):
            raise Violation(
                "a step out of turn",
                event.rank,
                event.time_s,
                expected=f"step {first}" + (f" to {last}" if last > first else ""),
                found=f"step {event.step}",
            )
        self._generations[event.rank] = event.generation
        self._reached[event.rank] = event.step + 1

    def regrouped(self, event: Regrouped) -> None:
        """Continue at the group's progress, which is never behind that of its members."""
        if not self._apart:
            return
        reached, lost = event.steps[event.rank], event.members[event.rank] - self._generations[event.rank]
        if reached < self._reached[event.rank] and not (lost or self._leaves_out):
            raise Violation(
                "steps that a group has done",
                event.rank,
                event.time_s,
                expected=f"at least {self._reached[event.rank]}",
                found=reached,
            )
        self._reached[event.rank], self._generations[event.rank] = reached, event.members[event.rank]

    def ended(self, event: Ended) -> None:
        """One worker that has taken the last step is enough where workers regroup."""
        if self._leaves_out or not self._counted:
            return
        missed = {rank: event.steps - self._reached[rank] for rank in event.survivors}
        if self._regroups:
            missed = {rank: min(missed.values()) for rank in event.survivors}
        for rank, count in missed.items():
            lost = event.generations.get(rank, 0) - self._generations[rank]
            if self._skips and lost:
                continue
            if not 0 <= count <= lost + self._apart:
                raise Violation(
                    "steps at the end", rank, event.time_s, expected=event.steps, found=event.steps - count
                )


class EveryBatch(Invariant):
    """All batches are taken, by whichever unit of workers draws them; of a run in which no worker is lost.

    Args:
        units: workers by rank.
    """

    def __init__(self, units: Sequence[Sequence[int]]) -> None:
        self._units = units
        self._taken: Counter[int] = Counter()

    def stepped(self, event: Stepped) -> None:
        self._taken[event.rank] += 1

    def ended(self, event: Ended) -> None:
        workers = [rank for unit in self._units for rank in unit]
        if any(event.generations.get(rank, 1) for rank in workers):
            return
        taken = [{self._taken[rank] for rank in unit} for unit in self._units]
        if any(len(each) > 1 for each in taken) or sum(map(max, taken)) != event.steps * len(self._units):
            raise Violation(
                "batches that are taken",
                self._units[0][0],
                event.time_s,
                expected=f"{event.steps * len(self._units)} in all, as many by each member of a unit",
                found=", ".join(f"{rank}: {self._taken[rank]}" for rank in workers),
            )


class Filter(Invariant):
    """Pass events on to another invariant; a subclass leaves some out, or changes them first.

    Args:
        inner: the other invariant.
    """

    def __init__(self, inner: Invariant) -> None:
        self._inner = inner

    def delivered(self, event: Delivered) -> None:
        self._inner.delivered(event)

    def handled(self, event: Handled) -> None:
        self._inner.handled(event)

    def stepped(self, event: Stepped) -> None:
        self._inner.stepped(event)

    def regrouped(self, event: Regrouped) -> None:
        self._inner.regrouped(event)

    def ended(self, event: Ended) -> None:
        self._inner.ended(event)


class Meetings(Filter):
    """Pass on only the steps after which workers have met, such as those that end with a mean of all models.

    Args:
        inner: the other invariant, which looks at steps.
        meet: whether they have met after a step, by its number.
    """

    def __init__(self, inner: Invariant, meet: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self._meet = meet

    def stepped(self, event: Stepped) -> None:
        if self._meet(event.step):
            self._inner.stepped(event)


class Undisturbed(Filter):
    """Forward only events before workers regroup for the first time, or a server is notified of a failure.

    Args:
        inner: the other invariant, which looks at steps, and at servers.
    """

    def __init__(self, inner: Invariant) -> None:
        super().__init__(inner)
        self._over = False

    def handled(self, event: Handled) -> None:
        self._over |= event.message is None
        if not self._over:
            self._inner.handled(event)

    def stepped(self, event: Stepped) -> None:
        self._over |= event.regrouped is not None
        if not self._over:
            self._inner.stepped(event)

    def ended(self, event: Ended) -> None:
        if not self._over:
            self._inner.ended(event)
