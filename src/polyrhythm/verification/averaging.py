"""Workers with models of their own that are averaged: with each other in rounds, or with a centre on servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.training.flat_parameters import shards
from polyrhythm.verification.invariant import Conditions, Delivered, Handled, Invariant, Stepped, Violation

_NEVER = -1


@dataclass
class _Model:
    """One worker: its vector after step `at`, and whether it counts in a mean."""

    vector: Tensor
    generation: int = 0
    at: int = _NEVER
    counts: bool = True


class LocalModels(Invariant):
    """No update is lost or doubled, neither between two means nor by a mean.

        w_i(s) = w_i(s-1) - g_i(s)                          between two means
        w_i(s) = mean over members j of w_j(s-1) - g_j(s)   at a mean; a worker that came since the last one does not
                                                            count, unless no other is left

    Args:
        conditions: of the run; without known gradients nothing is checked.
        meet: whether all workers have met after a step, by its number.
    """

    def __init__(self, conditions: Conditions, meet: Callable[[int], bool]) -> None:
        self._gradient = conditions.gradient
        self._workers = conditions.roles.workers
        self._meet = meet
        zeros = torch.zeros(conditions.numbers if self._gradient else 0)
        self._models = {rank: _Model(zeros) for rank in self._workers}
        self._met = _NEVER
        self._outcome = self._before = zeros
        self._brought: dict[tuple[int, int], Tensor] = {}

    def stepped(self, event: Stepped) -> None:
        if self._gradient is None:
            return
        model = self._models[event.rank]
        if event.generation != model.generation:
            model = self._came(event)
        elif model.at < self._met < event.step:  # the mean broke for this worker, and was handed on to it
            model.vector, model.at, model.counts = self._outcome, self._met, True
        if self._meet(event.step):
            self._check_mean(event)
            model.counts = True
        elif model.at == event.step - 1:
            self._compare(event, [self._stepped_on(model.vector, event.rank, event.step)])
        model.vector, model.at = event.vector.clone(), event.step

    def _came(self, event: Stepped) -> _Model:
        """Enter a successor: it holds the last mean at the beginning of a round, else a model of another worker."""
        first = self._met == event.step - 1 and not self._meet(event.step)
        model = _Model(self._outcome, event.generation, event.step - 1 if first else _NEVER, first)
        self._models[event.rank] = model
        return model

    def _check_mean(self, event: Stepped) -> None:
        if event.step > self._met:
            self._met, self._before = event.step, self._outcome
            self._brought = {
                (rank, model.generation): self._stepped_on(model.vector, rank, event.step)
                for rank, model in self._models.items()
                if model.counts and model.at == event.step - 1 and (event.step == 0 or model.at > _NEVER)
            }
        there = event.regrouped or dict.fromkeys(self._workers, 0)
        brought = [self._brought[member] for member in there.items() if member in self._brought]
        if event.regrouped is not None and not brought:  # all have come since, with models of who is lost
            self._outcome = event.vector.clone()
            return
        wholes = [
            brought + list(some)
            for many in range(len(there) if event.regrouped is not None else 1)
            for some in combinations(self._doubtful(event.step, there), many)
        ]
        self._compare(event, [torch.stack(whole).sum(0) / len(whole) for whole in wholes if whole])
        self._outcome = event.vector.clone()

    def _doubtful(self, step: int, there: dict[int, int]) -> list[Tensor]:
        """Return what may be in a mean or not.

        A worker whose first step ends with a mean counts if it came before the others took that step. A worker that has
        been replaced may have taken part, or was lost before.
        """
        new = [member for member in there.items() if member not in self._brought]
        early = [self._stepped_on(self._before, rank, step) for rank, _ in new]
        replaced = [
            vector
            for (rank, generation), vector in self._brought.items()
            if there.get(rank, generation) != generation
        ]
        return early + replaced

    def _stepped_on(self, vector: Tensor, rank: int, step: int) -> Tensor:
        assert self._gradient is not None, "asked only where gradients are known"
        return vector - self._gradient(self._workers.index(rank), step)

    def _compare(self, event: Stepped, possible: list[Tensor]) -> None:
        vector = event.vector.to(self._outcome.dtype)
        wrong = [int((expected != vector).sum()) for expected in possible]
        if min(wrong, default=1):
            raise Violation(
                f"parameters after step {event.step}",
                event.rank,
                event.time_s,
                expected="the sum of all workers' mean gradients"
                if self._meet(event.step)
                else "its own step",
                found=f"{min(wrong, default=len(vector))} of {len(vector)} numbers wrong",
            )


class Elastic(Invariant):
    """What the centre gains in an exchange is what the worker loses, bit for bit, and nothing else moves either.

        d = alpha (x - c),   c' = c + d   at a server,   x' = x - d - g   at a worker      steps of rate 1, in order

    Args:
        conditions: of the run; without known gradients workers are not followed.
        alpha: share of the difference by which each side moves.
        plain: whether a worker's flat vector holds its parameters after a step.
        pull: by how much a worker moves, over how much the centre does.
    """

    def __init__(self, conditions: Conditions, alpha: float, *, plain: bool, pull: float = 1.0) -> None:
        roles = conditions.roles
        self._alpha = alpha
        self._pull = pull
        self._gradient = conditions.gradient if plain else None
        self._workers = roles.workers
        self._shards = dict(zip(roles.servers, shards(conditions.numbers, len(roles.servers)), strict=True))
        self._centre: dict[int, Tensor] = {}
        self._offered: dict[tuple[int, int], Tensor] = {}
        self._own = {rank: torch.zeros(conditions.numbers) for rank in roles.workers}
        self._parting: defaultdict[int, set[int]] = defaultdict(set)
        self._generation: dict[tuple[int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        """Note what a worker offers, begins with, and is given."""
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
            elif self._generation.get(key) != event.to_generation:
                self._generation[key] = event.to_generation
                own.copy_(tensor)

    def handled(self, event: Handled) -> None:
        """Compute every difference, and move the centre."""
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
        """Add the differences of all who exchanged, in the order of their ranks."""
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
            raise Violation(what, rank, time_s, expected="the same bits", found=f"up to {float(away):g} away")
