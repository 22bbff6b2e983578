"""Ledger: what servers answer with is the sum of all gradients that they have taken, each once and whole.

values = 0 - sum over updates of the mean of its workers' gradients      steps of rate 1, exact numbers
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Conditions, Ended, Handled, Invariant, Violation
from polyrhythm.strategies.invariants.pushes import Pushes
from polyrhythm.training.flat_parameters import shards

Behind = Callable[[int, int, int], tuple[int, ...]]


class Ledger(Invariant):
    """Every gradient that was taken is applied exactly once, on all shards.

    Args:
        conditions: with gradients that are known.
        behind: gives the indices of the workers whose mean a gradient is, from the server that has it, its pusher and
            its step.
        drops: whether late gradients are dropped, so that not all come to be applied.
    """

    def __init__(self, conditions: Conditions, behind: Behind, *, drops: bool = False) -> None:
        assert conditions.gradient is not None, "a ledger is kept of gradients that are known"
        servers = conditions.cast.servers
        self._gradient = conditions.gradient
        self._behind = behind
        self._shards = dict(zip(servers, shards(conditions.numbers, len(servers)), strict=True))
        self._values = {
            server: torch.zeros(shard.stop - shard.start) for server, shard in self._shards.items()
        }
        self._pushes = Pushes(drops=drops)
        self._drops = drops

    def handled(self, event: Handled) -> None:
        """Books an update, and compares what is answered."""
        applied = self._pushes.follow(event)
        if applied:
            members = [
                (worker, push.message.step)
                for push in applied
                for worker in self._behind(event.server, push.source, push.message.step)
            ]
            shard = self._shards[event.server]
            total = sum(
                (self._gradient(*member)[shard] for member in members[1:]), self._gradient(*members[0])[shard]
            )
            self._values[event.server] -= total if len(members) == 1 else total / len(members)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._compare(event, to, reply.tensor)

    def _compare(self, event: Handled, to: int, found: Tensor) -> None:
        expected = self._values[event.server]
        if expected.shape == found.shape and torch.equal(expected, found.to(expected.dtype)):
            return
        what = f"parameters for rank {to}, the sum of what was acknowledged"
        if expected.shape != found.shape:
            sizes = f"{len(expected)} numbers", f"{len(found)}"
            raise Violation(what, rank=event.server, time_s=event.time_s, expected=sizes[0], found=sizes[1])
        wrong = torch.nonzero(expected != found.to(expected.dtype)).flatten()
        first = int(wrong[0])
        raise Violation(
            f"{what}, number {first} of {len(expected)} ({len(wrong)} are wrong)",
            rank=event.server,
            time_s=event.time_s,
            expected=float(expected[first]),
            found=float(found[first]),
        )

    def ended(self, event: Ended) -> None:
        """All steps of all who have left came to all servers."""
        if self._drops:
            return
        for server in self._shards:
            for source in event.survivors:
                pushed = self._pushes.come(server, source)
                if self._behind(server, source, 0) and pushed != event.steps:
                    raise Violation(
                        f"steps of rank {source} at the end",
                        rank=server,
                        time_s=event.time_s,
                        expected=event.steps,
                        found=pushed,
                    )
