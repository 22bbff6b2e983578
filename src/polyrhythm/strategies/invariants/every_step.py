"""Every step: each worker's steps are taken one after the other, by it or by its successors, up to the last.

A step of a worker is a batch, so every sample is accounted for: it is seen, or it belongs to a step that nobody took of
a worker that was lost, from the step on that it had reached.
"""

from __future__ import annotations

from collections.abc import Collection

from polyrhythm.strategies.invariant import Ended, Invariant, Regrouped, Stepped, Violation


class EveryStep(Invariant):
    """No step is left out, and none is taken twice by the same incarnation.

    A successor may take again what had been its predecessor's, if its effect was lost. Each that was lost may have died
    with one step of which only the gradient was seen. Where workers regroup, steps that somebody had finished are
    handed on to the others, with their gradients in them.

    Args:
        workers: their ranks.
        leaves_out: whether a worker may leave steps out to be where the others are.
        regroups: whether workers regroup.
        again: whether those who regroup may take their latest step again, whose update was not whole.
        apart: whether groups regroup: who does is told how far its group has come, and the very last step may be over
            though none of those who are left has said so.
        skips: whether a successor begins where others are, and steps that they took without it are over.
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
    ) -> None:
        self._apart = apart
        self._skips = skips
        self._again = again
        self._formations = dict.fromkeys(workers, 0)
        self._leaves_out = leaves_out
        self._regroups = regroups
        self._reached = dict.fromkeys(workers, 0)
        self._incarnations = dict.fromkeys(workers, 0)

    def stepped(self, event: Stepped) -> None:
        """Compares with the step before it."""
        expected = self._reached[event.rank]
        lost = event.incarnation - self._incarnations[event.rank]
        first, last = (0 if lost else expected), expected + lost
        if self._again and event.formation != self._formations[event.rank]:
            first = min(first, expected - 1)
        self._formations[event.rank] = event.formation
        bounded = not (self._leaves_out or (self._skips and lost)) and event.regrouped is None
        if event.step < first or (event.step > last and bounded):
            raise Violation(
                "a step out of turn",
                rank=event.rank,
                time_s=event.time_s,
                expected=f"step {first}" + (f" to {last}" if last > first else ""),
                found=f"step {event.step}",
            )
        self._incarnations[event.rank] = event.incarnation
        self._reached[event.rank] = event.step + 1

    def regrouped(self, event: Regrouped) -> None:
        """Goes on where its group has come to, which is never behind what it had done itself."""
        if not self._apart:
            return
        told, lost = event.steps[event.rank], event.members[event.rank] - self._incarnations[event.rank]
        if told < self._reached[event.rank] and not (lost or self._leaves_out):
            raise Violation(
                "steps that a group has done",
                rank=event.rank,
                time_s=event.time_s,
                expected=f"at least {self._reached[event.rank]}",
                found=told,
            )
        self._reached[event.rank], self._incarnations[event.rank] = told, event.members[event.rank]

    def ended(self, event: Ended) -> None:
        """All who have left had taken their last step, or one of them where they regroup."""
        if self._leaves_out:
            return
        missed = {rank: event.steps - self._reached[rank] for rank in event.survivors}
        if self._regroups:
            missed = {rank: min(missed.values()) for rank in event.survivors}
        for rank, count in missed.items():
            lost = event.incarnations.get(rank, 0) - self._incarnations[rank]
            if self._skips and lost:
                continue
            if not 0 <= count <= lost + self._apart:
                raise Violation(
                    "steps at the end",
                    rank=rank,
                    time_s=event.time_s,
                    expected=event.steps,
                    found=event.steps - count,
                )
