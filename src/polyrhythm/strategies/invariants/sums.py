"""Sums: what servers hold is the sum of all gradients that were pushed to them in sums, each once and whole.

values = 0 - sum over pushes of (gradients since the pusher's push before)      steps of rate 1, exact numbers
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Conditions, Ended, Handled, Invariant, Violation
from polyrhythm.training.flat_parameters import shards


class Sums(Invariant):
    """Every gradient is in exactly one sum that was applied.

    Args:
        conditions: with gradients that are known.
    """

    def __init__(self, conditions: Conditions) -> None:
        assert conditions.gradient is not None, "sums are checked of gradients that are known"
        cast = conditions.cast
        self._gradient = conditions.gradient
        self._workers = cast.workers
        self._shards = dict(zip(cast.servers, shards(conditions.numbers, len(cast.servers)), strict=True))
        self._values = {
            server: torch.zeros(shard.stop - shard.start) for server, shard in self._shards.items()
        }
        self._steps: defaultdict[tuple[int, int], int] = defaultdict(int)

    def handled(self, event: Handled) -> None:
        """Books a sum, and compares what is answered."""
        message = event.message
        if message is not None and message.kind is Kind.PUSH and message.tensor is not None:
            self._book(event, message.step + 1, message.tensor)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._compare(event, f"parameters for rank {to}", self._values[event.server], reply.tensor)

    def _book(self, event: Handled, steps: int, found: Tensor) -> None:
        key = event.server, event.source
        worker, before = self._workers.index(event.source), self._steps[key]
        if steps <= before:
            return
        expected = torch.zeros_like(found)
        for step in range(before, steps):
            expected += self._gradient(worker, step)[self._shards[event.server]]
        self._compare(
            event, f"the sum of rank {event.source}'s steps {before} to {steps - 1}", expected, found
        )
        self._steps[key] = steps
        self._values[event.server] -= expected

    def ended(self, event: Ended) -> None:
        """All steps of all who have left came to all servers."""
        for server in self._shards:
            for source in event.survivors:
                if self._steps[server, source] != event.steps:
                    raise Violation(
                        f"steps of rank {source} at the end",
                        rank=server,
                        time_s=event.time_s,
                        expected=event.steps,
                        found=self._steps[server, source],
                    )

    @staticmethod
    def _compare(event: Handled, what: str, expected: Tensor, found: Tensor) -> None:
        wrong = int((expected != found.to(expected.dtype)).sum())
        if wrong:
            raise Violation(
                what,
                rank=event.server,
                time_s=event.time_s,
                expected="the same",
                found=f"{wrong} numbers differ",
            )
