"""Stale synchronous parallel (SSP): no worker begins a step more than s ahead of the slowest.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.

    worker i may begin step c_i  iff  c_i - s <= min_j c_j        c_j = steps that j has completed

s = `s`. Steps in progress differ by at most s; completed counts may differ by s + 1, where one worker has
just finished and now waits. Every gradient is an update of its own as soon as it arrives. So a read at step c
holds all updates of the steps before c - s, all of the reader's own, and some more. With s = 0 there are no
reads in between, and the gradients of a step are one update, their mean: this is the synchronous consistency.
With s as large as the run it is the asynchronous one.

    cached_reads = true      parameters travel to i only if its copy may lack updates of steps before c_i - s

Otherwise the answer is empty, and the worker applies its own gradient to its own copy: it reads what it wrote. On
average, M/(s+1) bytes of parameters then travel per step.

A replacement of a lost worker takes its remaining steps. Its clock begins with its first gradient, at the
slowest of the others', so that they do not wait until it has caught up. While it catches up, it does not pass
the first.

Departure from the paper: the server runs the optimizer. So a worker's own updates use an optimizer of its
own,
which with momentum has seen its own gradients only. A fresh copy replaces them.
"""

from __future__ import annotations

from pydantic import Field

from polyrhythm.strategies.parameter_server.consistency.synchronous import SynchronousGate
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, Gate
from polyrhythm.strategies.state import UNCHANGED, StateField, reset


class BoundedStaleness(Consistency):
    """The quickest wait for the slowest, when they are too far ahead.

    Attributes:
        s: largest difference between the workers' steps in progress.
        cached_reads: whether parameters are sent only to workers with copies that are too old.
    """

    s: int = Field(default=3, ge=0)
    cached_reads: bool = False

    @property
    def own_updates(self) -> bool:
        return self.cached_reads and self.s > 0

    def in_step(self) -> bool:
        return self.s == 0

    def steps_ahead(self) -> int:
        return self.s

    def gathers(self, pushers: int) -> int:
        return 1 if self.s else pushers

    def spares(self, pushers: int) -> int:
        return pushers

    def gate(self, pushers: int) -> Gate:
        return (
            BoundedStalenessGate(pushers, self.s, self.cached_reads) if self.s else SynchronousGate(pushers)
        )


class BoundedStalenessGate(Gate):
    """Keeps the pushers' clocks, and blocks those that are too far ahead."""

    fields = (
        StateField("clocks", list[int], reset(lambda start: start.step, "pusher")),
        StateField("credits", list[int], reset(0, "pusher"), absent=UNCHANGED),
    )

    def __init__(self, pushers: int, s: int, cached_reads: bool) -> None:
        self._s = s
        self._cached_reads = cached_reads
        self._clocks = [0] * pushers
        self._credits = [0] * pushers
        """Lead of each clock over its pusher's steps, for replacements that were behind when they joined."""
        self._present = set(range(pushers))
        self._entering: set[int] = set()
        """Replacements that have not pushed yet, and are not waited for."""
        self._copied = [-1] * pushers
        """Up to which step every pusher's copy has all updates; -1: it has none."""
        self._waiting: set[int] = set()

    def ask(self, pusher: int, step: int) -> Decision:
        self._set_clock(pusher, step)
        self._copied[pusher] = -1
        self._waiting.add(pusher)
        return self._decide()

    def arrive(self, pusher: int, step: int) -> Decision:
        if pusher in self._entering:
            self._entering.discard(pusher)
            slowest = min((self._clocks[other] for other in self._present), default=0)
            self._credits[pusher] = max(0, slowest - step - 1)
            self._present.add(pusher)
        self._set_clock(pusher, step + 1)
        self._waiting.add(pusher)
        return self._decide((pusher,))

    def leave(self, pusher: int) -> Decision:
        self._present.discard(pusher)
        self._entering.discard(pusher)
        self._waiting.discard(pusher)
        self._credits[pusher] = 0
        self._rebase()
        return self._decide()

    def join(self, pusher: int) -> None:
        """Let it in; its clock counts again from its first gradient on."""
        self._entering.add(pusher)

    def _set_clock(self, pusher: int, steps: int) -> None:
        """Count a credit only as far as it is still behind: else it would wait for pushers that have done all steps.

        The limit is the first of those that never were behind: two that catch up would block each other, and
        all others.
        """
        if self._credits[pusher]:
            true = (self._clocks[other] for other in self._present if not self._credits[other])
            self._credits[pusher] = max(0, min(self._credits[pusher], max(true, default=0) - steps))
        self._clocks[pusher] = steps + self._credits[pusher]

    def _rebase(self) -> None:
        """Let one at least count its steps alone, if all remaining ones were behind once; differences stay."""
        least = min((self._credits[pusher] for pusher in self._present), default=0)
        for pusher in self._present if least else ():
            self._credits[pusher] -= least
            self._clocks[pusher] -= least
            self._copied[pusher] = max(-1, self._copied[pusher] - least)

    def _decide(self, apply: tuple[int, ...] = ()) -> Decision:
        counted = self._present or self._entering
        if not counted:
            return Decision(apply)
        slowest = min(self._clocks[pusher] for pusher in counted)
        free = sorted(pusher for pusher in self._waiting if self._clocks[pusher] - self._s <= slowest)
        self._waiting.difference_update(free)
        fresh = [pusher for pusher in free if self._must_read(pusher)]
        for pusher in fresh:
            self._copied[pusher] = slowest
        return Decision(apply, tuple(fresh), tuple(pusher for pusher in free if pusher not in fresh))

    def _must_read(self, pusher: int) -> bool:
        return not self._cached_reads or self._copied[pusher] < max(0, self._clocks[pusher] - self._s)
