"""Elastic: what the centre gains in an exchange is what the worker loses, and nothing else moves either.

d = alpha (x - c),   c' = c + d   at a server,   x' = x - d - g   at a worker      steps of rate 1, one after the other
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Conditions, Delivered, Handled, Invariant, Stepped, Violation
from polyrhythm.training.flat_parameters import shards


class Elastic(Invariant):
    """Follows the centre and every worker bit by bit, from the messages alone.

    Args:
        conditions: with or without known gradients; without them workers are not followed.
        alpha: share of the difference that each side moves by.
        plain: whether a worker's flat vector holds its parameters after a step.
        pull: how far a worker is moved, in units of how far the centre is.
    """

    def __init__(self, conditions: Conditions, alpha: float, *, plain: bool, pull: float = 1.0) -> None:
        cast = conditions.cast
        self._alpha = alpha
        self._pull = pull
        self._gradient = conditions.gradient if plain else None
        self._workers = cast.workers
        self._shards = dict(zip(cast.servers, shards(conditions.numbers, len(cast.servers)), strict=True))
        self._centre: dict[int, Tensor] = {}
        self._offered: dict[tuple[int, int], Tensor] = {}
        self._own = {rank: torch.zeros(conditions.numbers) for rank in cast.workers}
        self._parting: defaultdict[int, set[int]] = defaultdict(set)
        self._incarnation: dict[tuple[int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        """Notes what a worker offers, begins with, and is given."""
        tensor = event.message.tensor
        if tensor is None or tensor.dtype == torch.uint8:
            return
        if event.to in self._shards:
            self._offered[event.to, event.source] = tensor.clone()
        elif event.source in self._shards:
            own = self._own[event.to][self._shards[event.source]]
            key = event.source, event.to
            if event.message.kind is Kind.DIFFERENCE:
                own.sub_(tensor)
            elif self._incarnation.get(key) != event.to_incarnation:
                self._incarnation[key] = event.to_incarnation
                own.copy_(tensor)

    def handled(self, event: Handled) -> None:
        """Makes every difference again, and moves the centre."""
        message, server = event.message, event.server
        if message is not None and message.kind is Kind.PARAMETERS:
            self._centre[server] = self._offered[server, event.source].clone()
        if message is not None and message.kind is Kind.LEAVE and message.tensor is not None:
            self._parting[server].add(event.source)
        given = {to: reply.tensor for to, reply in event.replies if reply.kind is Kind.DIFFERENCE}
        if event.version != event.version_before:
            self._move(event, given)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._compare(
                    server, event.time_s, f"the centre for rank {to}", (self._centre[server], reply.tensor)
                )

    def _move(self, event: Handled, given: dict[int, Tensor | None]) -> None:
        """Adds the differences of all who exchanged, in the order of their ranks."""
        before = self._centre[event.server].clone()
        for rank in sorted(given.keys() | self._parting.pop(event.server, set())):
            difference = (self._offered[event.server, rank] - before) * self._alpha
            found = given.get(rank)
            if found is not None:
                self._compare(
                    event.server,
                    event.time_s,
                    f"the difference for rank {rank}",
                    (difference * self._pull, found),
                )
            self._centre[event.server] += difference

    def stepped(self, event: Stepped) -> None:
        """Makes the worker's own step again."""
        if self._gradient is None:
            return
        own = self._own[event.rank]
        own.sub_(self._gradient(self._workers.index(event.rank), event.step))
        self._compare(
            event.rank, event.time_s, f"own parameters after step {event.step}", (own, event.vector)
        )

    @staticmethod
    def _compare(rank: int, time_s: float, what: str, values: tuple[Tensor, Tensor]) -> None:
        expected, found = values
        if not torch.equal(expected, found.to(expected.dtype)):
            away = (expected - found).abs().max()
            raise Violation(
                what, rank=rank, time_s=time_s, expected="the same bits", found=f"up to {float(away):g} away"
            )
