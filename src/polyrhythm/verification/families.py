"""The invariants of each family of strategies, and which of them a strategy must keep, by its class and traits.

`invariants_for` dispatches on the class of the strategy: a derived strategy keeps the invariants of the class it
derives from, and one that is registered nowhere keeps those of `general` alone. A strategy of one's own registers
more next to its class or, better, next to its tests:

    @invariants_for.register
    def _(strategy: MyStrategy, conditions: Conditions) -> list[Invariant]:
        return [*general(strategy, conditions), Replicas(conditions, [conditions.roles.workers], alone=False)]

Those of gossip are in `gossip.py`, those of one server in `servers.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from itertools import combinations

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.allreduce.lazy_synchronous import LazySynchronous
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.averaging.diloco import DiLoCo
from polyrhythm.strategies.averaging.hierarchical_averaging import HierarchicalAveraging
from polyrhythm.strategies.averaging.post_local_sgd import PostLocalSGD
from polyrhythm.strategies.averaging.rounds.averaging import Averaging
from polyrhythm.strategies.averaging.rounds.rounds_worker import every
from polyrhythm.strategies.gossip.ad_psgd import ADPSGD
from polyrhythm.strategies.gossip.d_psgd import DPSGD
from polyrhythm.strategies.gossip.sgp import SGP
from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.downpour import Downpour
from polyrhythm.strategies.parameter_server.elastic.averaging import ElasticAveraging
from polyrhythm.strategies.parameter_server.gaia import Gaia, SiteMap
from polyrhythm.strategies.parameter_server.hierarchical import Hierarchical, Levels
from polyrhythm.strategies.parameter_server.hogwild import Hogwild
from polyrhythm.strategies.parameter_server.mixed import Mixed
from polyrhythm.strategies.parameter_server.periodic_averaging import PeriodicAveraging
from polyrhythm.strategies.parameter_server.sandblaster import Sandblaster
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.flat_parameters import shards
from polyrhythm.verification.general import (
    EveryBatch,
    EveryStep,
    Filter,
    Meetings,
    Progress,
    Undisturbed,
    Versions,
)
from polyrhythm.verification.gossip import Exchanges, MatrixMixing
from polyrhythm.verification.invariant import (
    Conditions,
    Delivered,
    Ended,
    Handled,
    Invariant,
    Regrouped,
    Stepped,
    Violation,
)
from polyrhythm.verification.servers import (
    Answers,
    Batches,
    Ledger,
    OfShards,
    Sums,
    adds_up,
    serving_invariants,
)


def general(
    strategy: Strategy, conditions: Conditions, every_step: list[Invariant] | None = None
) -> list[Invariant]:
    """Return the invariants of every strategy: progress, monotone versions, and every step in its turn.

    Args:
        strategy: strategy; its traits decide what a step may omit.
        conditions: conditions of the run.
        every_step: invariants that replace `EveryStep` over all workers.
    """
    workers = conditions.roles.workers
    if every_step is None:
        traits, faults = strategy.traits(len(workers)), strategy.faults(len(workers))
        leaves_out, again = traits.skips_steps, faults.may_repeat
        counted, regroups = not conditions.units, faults.regroups
        every_step = [
            EveryStep(workers, leaves_out=leaves_out, regroups=regroups, again=again, counted=counted)
        ]
    batches = [EveryBatch(conditions.units)] if conditions.units else []
    return [Progress(conditions.patience_s), Versions(), *every_step, *batches]


@singledispatch
def invariants_for(strategy: Strategy, conditions: Conditions) -> list[Invariant]:
    """Return the invariants that hold after every event of a run of this strategy.

    Args:
        strategy: strategy of the run.
        conditions: conditions of the run.
    """
    return general(strategy, conditions)


# Replicas: equal bits after equal steps, and every gradient in them exactly once


def differing(first: Tensor, second: Tensor) -> int:
    """Return how many numbers of two vectors differ; what has overflowed to no number at both places does not."""
    return int(((first != second) & ~(first.isnan() & second.isnan())).sum())


class Replicas(Invariant):
    """Members of a group hold the same bits after the same step; if gradients are known, the right ones.

    When a group regroups, a step that only lost members had finished is repeated by the survivors. A member
    that has finished it never continues together with them.

    Args:
        conditions: conditions of the run.
        groups: ranks of workers that step together.
        alone: whether a group's parameters are the sum of its own gradients only, so that they can be predicted.
    """

    def __init__(self, conditions: Conditions, groups: Sequence[Sequence[int]], *, alone: bool) -> None:
        self._group_of = {rank: number for number, group in enumerate(groups) for rank in group}
        self._groups = [tuple(group) for group in groups]
        self._workers = conditions.roles.workers
        self._gradient = conditions.gradient if alone else None
        self._latest: dict[int, Stepped] = {}
        self._finishers: dict[int, set[tuple[int, int]]] = {}
        zeros = torch.zeros(conditions.numbers if self._gradient else 0)
        self._sums = {number: zeros.clone() for number in range(len(groups))}
        self._sums_before = dict(self._sums)

    def stepped(self, event: Stepped) -> None:
        """Compare with the first member of the group to have finished this step."""
        number = self._group_of[event.rank]
        latest = self._latest.get(number)
        step, first = (-1, event.vector) if latest is None else (latest.step, latest.vector)
        if latest is not None and self._is_taken_again(event, latest, number):
            self._sums[number] = self._sums_before[number]
            step -= 1
        if event.step > step:
            self._latest[number] = replace(event, vector=event.vector.clone())
            self._finishers[number] = set()
            self._sums_before[number] = self._sums[number].clone()
            self._check_first(event, number, step)
        elif event.step < step or differing(first, event.vector):
            raise Violation(
                "a replica that differs from the others of its group",
                event.rank,
                event.time_s,
                expected=f"step {step} and the same bits",
                found=f"step {event.step}, {differing(first, event.vector)} numbers differ",
            )
        self._finishers[number].add((event.rank, (event.regrouped or {}).get(event.rank, 0)))

    def _is_taken_again(self, event: Stepped, latest: Stepped, number: int) -> bool:
        """Return whether a later view repeats the latest step because none of its members had finished it."""
        if event.step != latest.step or event.regrouped in (None, latest.regrouped):
            return False
        return self._finishers[number].isdisjoint((event.regrouped or {}).items())

    def _check_first(self, event: Stepped, number: int, step: int) -> None:
        if self._gradient is None:
            return
        members = self._groups[number] if event.regrouped is None else tuple(event.regrouped)
        for missed in range(step + 1, event.step + 1):
            for rank in members:
                self._sums[number] -= self._gradient(self._workers.index(rank), missed) / len(members)
        wrong = int((self._sums[number] != event.vector.to(self._sums[number].dtype)).sum())
        if wrong:
            raise Violation(
                f"parameters after step {event.step}",
                event.rank,
                event.time_s,
                expected="the sum of all workers' mean gradients",
                found=f"{wrong} of {len(event.vector)} numbers wrong",
            )


_Membership = tuple[str | int | None, tuple[int, ...]]
"""A membership view and its members."""


@dataclass
class _Taken:
    """One step.

    Attributes:
        before: `(numbers,)`, with the updates of all steps before it.
        by_view: parameters after it, for each view that has taken it.
        finishers: rank and generation of every worker that has taken it.
    """

    before: Tensor
    by_view: dict[_Membership, Tensor] = field(default_factory=dict)
    finishers: set[tuple[int, int]] = field(default_factory=set)


class LateReplicas(Invariant):
    """Replicas are equal, with updates up to one step late: each number gets each step's update once.

        after step s      a number has the updates of all steps before s; of step s too, if its worker is alone
                          or if the update had arrived before workers regrouped and repeated the step,
                          or where some numbers need not wait (`at_once`)

    Args:
        conditions: conditions of the run; without known gradients, members are only compared with each other.
        at_once: whether a server may return its numbers at once if its shard has only one bucket.
        alike: whether all get the same numbers at once; not where a replacement of a lost server serves.
    """

    def __init__(self, conditions: Conditions, *, at_once: bool = False, alike: bool = True) -> None:
        self._at_once, self._alike = at_once, alike
        self._workers = conditions.roles.workers
        self._gradient = conditions.gradient
        nothing = torch.zeros(conditions.numbers if self._gradient else 0)
        self._steps = [_Taken(nothing)]

    def stepped(self, event: Stepped) -> None:
        there = event.regrouped if event.regrouped is not None else dict.fromkeys(self._workers, 0)
        view = event.view, tuple(there)
        self._advance_to(event, set(there.items()), view)
        taken = self._steps[-1]
        taken.finishers.add((event.rank, there.get(event.rank, 0)))
        known = taken.by_view.setdefault(view, event.vector.clone())
        if self._alike and (wrong := differing(known, event.vector)):
            self._refuse(event, "the same bits as the others", wrong)
        if self._gradient is not None:
            own = [self._update(event.step, view)] if len(view[1]) == 1 or self._at_once else []
            self._compare(event, taken.before, [*self._updates(event.step, taken, view), *own])

    def _advance_to(self, event: Stepped, there: set[tuple[int, int]], view: _Membership) -> None:
        """Make the event's step the latest one; it is the next, or one beyond which only lost workers had got."""
        latest = len(self._steps) - 1
        if event.step == latest + 1:
            self._steps.append(_Taken(self._before_next(event, view)))
            return
        beyond = [taken for taken in self._steps[event.step + 1 :] if not taken.finishers.isdisjoint(there)]
        if event.step > latest or beyond:
            self._refuse(event, f"a step other than step {latest} of the others", 0)
        del self._steps[event.step + 1 :]

    def _before_next(self, event: Stepped, view: _Membership) -> Tensor:
        """Return the parameters before this step; the event contains all updates but its own."""
        if self._gradient is None:
            return self._steps[-1].before
        taken = self._steps[-1]
        if self._at_once:  # regrouping does not occur
            return taken.before - self._update(event.step - 1, view) if event.step else taken.before
        shown = event.vector.to(taken.before.dtype)
        if len(view[1]) == 1:
            shown = shown + self._update(event.step, view)
        updates = torch.stack([self._update(event.step - 1, each) for each in taken.by_view])
        wrong = int((taken.before - updates != shown).all(0).sum())
        if wrong:
            self._refuse(event, f"each number with one update of step {event.step - 1}", wrong)
        return shown.clone()

    def _compare(self, event: Stepped, before: Tensor, updates: Sequence[Tensor]) -> None:
        shown = event.vector.to(before.dtype)
        possible = torch.stack([torch.zeros_like(before), *updates])
        wrong = int((before - possible != shown).all(0).sum())
        if wrong:
            self._refuse(event, "all updates before this step's", wrong)

    def _updates(self, step: int, taken: _Taken, view: _Membership) -> list[Tensor]:
        """Return the updates that other views have made of a step; some numbers may have one of them."""
        return [self._update(step, each) for each in taken.by_view if each != view]

    def _update(self, step: int, view: _Membership) -> Tensor:
        assert self._gradient is not None, "asked only where gradients are known"
        gradients = [self._gradient(self._workers.index(rank), step) for rank in view[1]]
        return torch.stack(gradients).sum(0) / len(gradients)

    def _refuse(self, event: Stepped, expected: str, wrong: int) -> None:
        raise Violation(
            f"parameters after step {event.step}",
            event.rank,
            event.time_s,
            expected=expected,
            found=f"{wrong} of {len(event.vector)} numbers differ",
        )


class OneVector(Invariant):
    """Workers share one vector: no update is lost, torn or doubled.

        w = 0 - sum over all steps of all workers of their gradients      steps of rate 1, exact numbers

    Args:
        conditions: conditions with known gradients.
    """

    def __init__(self, conditions: Conditions) -> None:
        assert conditions.gradient is not None, "updates are checked that are known"
        self._gradient = conditions.gradient
        self._workers = conditions.roles.workers
        self._sum = torch.zeros(conditions.numbers)
        self._steps: Counter[int] = Counter()

    def stepped(self, event: Stepped) -> None:
        self._sum -= self._gradient(self._workers.index(event.rank), event.step)
        self._steps[event.rank] += 1
        wrong = int((self._sum != event.vector.to(self._sum.dtype)).sum())
        if wrong:
            raise Violation(
                f"the shared vector after step {event.step}",
                event.rank,
                event.time_s,
                expected=f"the sum of {self._steps.total()} updates",
                found=f"{wrong} of {len(self._sum)} numbers wrong",
            )

    def ended(self, event: Ended) -> None:
        for rank in event.survivors:
            if event.steps_of(rank) not in (None, self._steps[rank]):
                raise Violation(
                    f"updates of rank {rank} at the end",
                    rank,
                    event.time_s,
                    expected=event.steps_of(rank),
                    found=self._steps[rank],
                )


@invariants_for.register
def _(strategy: Synchronous, conditions: Conditions) -> list[Invariant]:
    workers = conditions.roles.workers
    replicas = Replicas(conditions, [workers], alone=strategy.traits(len(workers)).exact_sums)
    return [*general(strategy, conditions), replicas]


@invariants_for.register
def _(strategy: LazySynchronous, conditions: Conditions) -> list[Invariant]:
    return [*general(strategy, conditions), LateReplicas(conditions)]


@invariants_for.register
def _(strategy: Hogwild, conditions: Conditions) -> list[Invariant]:
    found = general(strategy, conditions)
    return found if conditions.gradient is None else [*found, OneVector(conditions)]


# Averaging: models of one's own that are averaged, with each other in rounds, or with a center on servers


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
        w_i(s) = mean over members j of w_j(s-1) - g_j(s)   at a mean; a worker that joined since the last one does not
                                                            count, unless no other remains

    Args:
        conditions: conditions of the run; without known gradients nothing is checked.
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
            model = self._enter_replacement(event)
        elif model.at < self._met < event.step:  # the mean broke for this worker, and was handed on to it
            model.vector, model.at, model.counts = self._outcome, self._met, True
        if self._meet(event.step):
            self._check_mean(event)
            model.counts = True
        elif model.at == event.step - 1:
            self._compare(event, [self._stepped_on(model.vector, event.rank, event.step)])
        model.vector, model.at = event.vector.clone(), event.step

    def _enter_replacement(self, event: Stepped) -> _Model:
        """Enter a replacement: it holds the last mean at the beginning of a round, else a model of another worker."""
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
        if event.regrouped is not None and not brought:  # all have joined since, with models of lost workers
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
        """Return the contributions that a mean may contain or not.

        A worker with a first step that ends with a mean counts if it arrived before the others took that step. A
        worker that has been replaced may have taken part, or was lost before.
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
    """The center's gain in an exchange is the worker's loss, bit for bit, and nothing else moves.

        d = alpha (x - c),   c' = c + d   at a server,   x' = x - d - g   at a worker      steps of rate 1, in order

    Args:
        conditions: conditions of the run; without known gradients workers are not followed.
        alpha: share of the difference by which each side moves.
        plain: whether a worker's flat vector holds its parameters after a step.
        pull: ratio of the worker's movement to the center's.
    """

    def __init__(self, conditions: Conditions, alpha: float, *, plain: bool, pull: float = 1.0) -> None:
        roles = conditions.roles
        self._alpha = alpha
        self._pull = pull
        self._gradient = conditions.gradient if plain else None
        self._workers = roles.workers
        self._shards = dict(zip(roles.servers, shards(conditions.numbers, len(roles.servers)), strict=True))
        self._center: dict[int, Tensor] = {}
        self._offered: dict[tuple[int, int], Tensor] = {}
        self._own = {rank: torch.zeros(conditions.numbers) for rank in roles.workers}
        self._parting: defaultdict[int, set[int]] = defaultdict(set)
        self._generation: dict[tuple[int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        """Record the vector that a worker sends, its initial one, and the one that it receives."""
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
        """Compute every difference, and move the center."""
        message, server = event.message, event.server
        if message is not None and message.kind is Kind.PARAMETERS:
            self._center[server] = self._offered[server, event.source].clone()
        if message is not None and message.kind is Kind.LEAVE and message.tensor is not None:
            self._parting[server].add(event.source)
        given = {to: reply.tensor for to, reply in event.replies if reply.kind is Kind.DIFFERENCE}
        if event.version != event.version_before:
            self._move(event, given)
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._compare(
                    server, event.time_s, f"the center for rank {to}", (self._center[server], reply.tensor)
                )

    def _move(self, event: Handled, given: dict[int, Tensor | None]) -> None:
        """Add the differences of all exchanging workers, in the order of their ranks."""
        before = self._center[event.server].clone()
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
            self._center[event.server] += difference

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


def _meets(strategy: Averaging, conditions: Conditions) -> Callable[[int], bool]:
    """Return a predicate of a step's number: whether all replicas are equal after it."""
    if isinstance(strategy, PostLocalSGD):
        first, ends = strategy.first_local_step(conditions.steps), every(strategy.steps)
        return lambda step: step < first or ends(step - first)
    return every(strategy.period)


@invariants_for.register
def _averaging(strategy: Averaging, conditions: Conditions) -> list[Invariant]:
    if isinstance(strategy, DiLoCo) and strategy.streams:  # all models are never equal before the end
        return general(strategy, conditions)
    meet = _meets(strategy, conditions)
    replicas = Meetings(Replicas(conditions, [conditions.roles.workers], alone=False), meet)
    exact = strategy.traits(len(conditions.roles.workers)).exact_sums
    models = [LocalModels(conditions, meet)] if strategy.sums_gradients and exact else []
    return [*general(strategy, conditions), replicas, *models]


@invariants_for.register
def _(strategy: HierarchicalAveraging, conditions: Conditions) -> list[Invariant]:
    workers = conditions.roles.workers
    groups = [workers[start : start + strategy.group] for start in range(0, len(workers), strategy.group)]
    # Groups may leave a mean out while they regroup.
    inside = Undisturbed(Meetings(Replicas(conditions, groups, alone=False), every(strategy.steps)))
    whole = Undisturbed(Meetings(Replicas(conditions, [workers], alone=True), _meets(strategy, conditions)))
    return [*_averaging(strategy, conditions), inside, whole]


@invariants_for.register
def _(strategy: ElasticAveraging, conditions: Conditions) -> list[Invariant]:
    alpha = strategy.rule(len(conditions.roles.workers)).alpha
    elastic = Elastic(conditions, alpha, plain=strategy.plain_steps)
    return [*general(strategy, conditions), Answers(conditions.roles), elastic]


@invariants_for.register
def _(strategy: PeriodicAveraging, conditions: Conditions) -> list[Invariant]:
    alpha = strategy.rule(len(conditions.roles.workers)).alpha
    elastic = Elastic(conditions, alpha, plain=True, pull=(1 - alpha) / alpha)
    return [*general(strategy, conditions), Answers(conditions.roles), elastic]


# Gossip: what the matrices of the topology give, or one answer to every question


@invariants_for.register
def _(strategy: DPSGD, conditions: Conditions) -> list[Invariant]:
    mixing = MatrixMixing(conditions, strategy.topology, strategy.check, gradient_first=False)
    return [*general(strategy, conditions), mixing]


@invariants_for.register
def _(strategy: SGP, conditions: Conditions) -> list[Invariant]:
    delay = int(strategy.overlap)
    mixing = MatrixMixing(conditions, strategy.topology, strategy.check, gradient_first=True, delay=delay)
    return [*general(strategy, conditions), mixing]


@invariants_for.register
def _(strategy: ADPSGD, conditions: Conditions) -> list[Invariant]:
    return [*general(strategy, conditions), Exchanges(conditions, strategy.topology)]


# Servers


@invariants_for.register
def _(strategy: Served, conditions: Conditions) -> list[Invariant]:
    consistency, handling = strategy.rules()
    traits = strategy.traits(len(conditions.roles.workers))
    pushers = traits.pushers(conditions.roles)
    in_step = consistency.in_step()
    found = general(strategy, conditions)
    if not traits.exact_sums:
        conditions = replace(conditions, gradient=None)
    found += serving_invariants(conditions, pushers, consistency, handling, in_step=in_step)
    if in_step and strategy.overlaps and conditions.buckets > 1:
        known = conditions if adds_up(handling) else replace(conditions, gradient=None)
        alike = strategy.replicas == 1
        found.append(Undisturbed(LateReplicas(known, at_once=True, alike=alike)))
    elif in_step:
        replicas = Replicas(conditions, [conditions.roles.workers], alone=adds_up(handling))
        found.append(Undisturbed(replicas))
    return found if strategy.replicas == 1 else [OfShards(conditions.roles, found)]


@invariants_for.register
def _(strategy: Downpour, conditions: Conditions) -> list[Invariant]:
    found = [*general(strategy, conditions), Answers(conditions.roles, (Kind.PULL, Kind.FETCH))]
    if strategy.compress is None and conditions.gradient is not None:
        found.append(Sums(conditions))
    return found if strategy.replicas == 1 else [OfShards(conditions.roles, found)]


@invariants_for.register
def _(strategy: Sandblaster, conditions: Conditions) -> list[Invariant]:
    replicas = Replicas(conditions, [conditions.roles.workers], alone=False)
    answers = Answers(conditions.roles, (Kind.PULL, Kind.PUSH))
    together = Undisturbed(Meetings(replicas, every(strategy.portions)))
    return [*general(strategy, conditions), answers, Batches(conditions.roles), together]


# Sites (Gaia)
#
# In the end worker 0's site holds all updates of all sites, each once; none was ever too far ahead:
#
#     w = 0 - sum over sites and rounds of the mean of a site's gradients      steps of rate 1, exact numbers


class Sites(Invariant):
    """Sent and kept gradients add up.

    Args:
        conditions: conditions of the run.
        sites: workers and servers of each site.
        lag: rounds by which the slowest site may be behind.
    """

    def __init__(self, conditions: Conditions, sites: SiteMap, lag: int) -> None:
        self._gradient = conditions.gradient
        self._workers = conditions.roles.workers
        self._sites = sites
        self._lag = lag
        cuts = shards(conditions.numbers, len(sites.servers[0]))
        self._place = {
            rank: (site, cut)
            for site, ranks in enumerate(sites.servers)
            for rank, cut in zip(ranks, cuts, strict=True)
        }
        self._clocks: Counter[int] = Counter()
        self._present = {rank: set(sites.members[site]) for rank, (site, _) in self._place.items()}
        self._asleep: set[int] = set()
        self._unawaited: set[tuple[int, int]] = set()
        """Pairs of servers: the first has been notified that all workers of the second are lost, and nothing since."""
        self._released_to: Counter[int] = Counter()
        """Round up to which a server's workers did not have to wait for another site without workers."""
        self._steps_pushed: Counter[tuple[int, int]] = Counter()
        self._held: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """Unapplied gradients of each server, as pairs of pusher and step."""
        self._sum = torch.zeros(conditions.numbers)
        self._shown: dict[int, Tensor] = {}

    def handled(self, event: Handled) -> None:
        """Follow which workers are there and what they push, book a round, and note what is answered."""
        server = event.server
        if event.source not in self._workers:
            self._on_delivery(event)
        else:
            self._follow(event)
            if event.version != event.version_before:
                self._book(server)
        stated = [
            reply.version
            for to, reply in event.replies
            if to in self._place and reply.kind is Kind.DIFFERENCE
        ]
        if stated and event.source in self._workers:
            self._tick(event, stated[0])
        if not self._present[server]:
            self._asleep.add(server)  # after a round that the loss of its last worker has ended
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None and to in self._workers:
                self._shown[server] = reply.tensor
                self._present[server].add(to)

    def _follow(self, event: Handled) -> None:
        server, source, message = event.server, event.source, event.message
        if message is None or message.kind is Kind.LEAVE:
            self._present[server].discard(source)
        elif message.kind is Kind.PUSH and message.step >= self._steps_pushed[server, source]:
            self._steps_pushed[server, source] = message.step + 1
            if message.weight > 0:
                self._held[server].append((source, message.step))

    def _on_delivery(self, event: Handled) -> None:
        message, pair = event.message, (event.server, event.source)
        if message is not None and message.kind is Kind.ANNOUNCE and message.stop:
            self._unawaited.add(pair)
        elif message is not None and message.kind is Kind.DIFFERENCE and pair in self._unawaited:
            self._unawaited.discard(pair)
            # Its workers may be in progress already.
            self._released_to[event.server] = self._clocks[event.server] + 1

    def _book(self, server: int) -> None:
        held = self._held.pop(server, [])
        if self._gradient is not None and held:
            cut = self._place[server][1]
            gradients = [self._gradient(self._workers.index(rank), step)[cut] for rank, step in held]
            self._sum[cut] -= torch.stack(gradients).sum(0) / len(gradients)

    def _tick(self, event: Handled, clock: int) -> None:
        """Check a round of a site; one without workers may skip some, since none was waiting for them."""
        server = event.server
        site, cut = self._place[server]
        left_out = clock - self._clocks[server] - 1
        if left_out < 0 or (left_out and server not in self._asleep):
            raise Violation(
                f"the round of site {site}",
                server,
                event.time_s,
                expected=self._clocks[server] + 1,
                found=clock,
            )
        self._clocks[server] = clock
        self._asleep.discard(server)
        same = [rank for rank, (_, where) in self._place.items() if where == cut and self._trains(rank)]
        others = [rank for rank in same if (server, rank) not in self._unawaited]
        slowest = min((self._clocks[rank] for rank in others), default=clock)
        if clock - slowest > self._lag + 1 and clock > self._released_to[server]:
            raise Violation(
                f"rounds of site {site}",
                server,
                event.time_s,
                expected=f"at most {self._lag + 1} more than the slowest site's {slowest}",
                found=clock,
            )

    def _trains(self, server: int) -> bool:
        return bool(self._present[server])

    def ended(self, event: Ended) -> None:
        """Worker 0's site has the sum of everything."""
        if self._gradient is None:
            return
        for server in self._sites.servers[0]:
            expected = self._sum[self._place[server][1]]
            wrong = int((expected != self._shown[server].to(expected.dtype)).sum())
            if wrong:
                raise Violation(
                    "the final parameters",
                    server,
                    event.time_s,
                    expected="the sum of all sites' updates",
                    found=f"{wrong} of {len(expected)} numbers wrong",
                )


@invariants_for.register
def _(strategy: Gaia, conditions: Conditions) -> list[Invariant]:
    sites = SiteMap.of(conditions.roles, strategy.sites)
    return [*general(strategy, conditions), Sites(conditions, sites, strategy.lag)]


# Groups in front of servers: invariants of servers, with a group or a leaf in a worker's place


_NO_NEWS = Message(Kind.BROKEN)


class OfMembers(Filter):
    """Pass on only the steps of some workers.

    Args:
        inner: the other invariant.
        ranks: ranks of the workers.
    """

    def __init__(self, inner: Invariant, ranks: Collection[int]) -> None:
        super().__init__(inner)
        self._ranks = ranks

    def stepped(self, event: Stepped) -> None:
        if event.rank in self._ranks:
            self._inner.stepped(event)

    def regrouped(self, event: Regrouped) -> None:
        if event.rank in self._ranks:
            self._inner.regrouped(event)

    def ended(self, event: Ended) -> None:
        there = tuple(rank for rank in event.survivors if rank in self._ranks)
        if there:
            self._inner.ended(replace(event, survivors=there))


class OfGroups(Filter):
    """Show another invariant each group as one pusher, under the rank of its first member.

    Only the failure of the member that sends for its group is a failure of the pusher. A group survives if any
    member does.

    Args:
        inner: the other invariant.
        roles: ranks by role.
        groups: ranks of the members of each.
    """

    def __init__(self, inner: Invariant, roles: RoleAssignment, groups: Sequence[tuple[int, ...]]) -> None:
        super().__init__(inner)
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._speaks: dict[tuple[int, int], int | None] = {
            (server, ranks[0]): ranks[0] for ranks in groups for server in roles.servers
        }
        self._speaks_next: dict[tuple[int, int], int] = {}

    def delivered(self, event: Delivered) -> None:
        source, to = self._named(event.source), self._named(event.to)
        self._inner.delivered(replace(event, source=source, to=to))

    def handled(self, event: Handled) -> None:
        name, message = self._named(event.source), event.message
        key = event.server, name
        speaker = self._speaks.get(key)
        if message is None and speaker != event.source:
            message = _NO_NEWS
        elif message is None:
            self._speaks[key] = self._speaks_next.pop(key, None)
        elif message.kind is Kind.PULL and speaker is None:
            self._speaks[key] = event.source
        elif message.kind is Kind.PULL and speaker != event.source:
            self._speaks_next[key] = event.source
        replies = [(self._named(to), reply) for to, reply in event.replies]
        self._inner.handled(replace(event, source=name, message=message, replies=replies))

    def ended(self, event: Ended) -> None:
        there = tuple(sorted({self._named(rank) for rank in event.survivors}))
        taken, generations = event.taken, dict[int, int]()
        if taken is not None:
            members = {name: [rank for rank in taken if self._named(rank) == name] for name in there}
            taken = {name: max(taken[rank] for rank in ranks) for name, ranks in members.items()}
            generations = {
                name: max(event.generations.get(rank, 1) for rank in ranks) for name, ranks in members.items()
            }
        self._inner.ended(replace(event, survivors=there, generations=generations, taken=taken))

    def _named(self, rank: int) -> int:
        return self._name_of.get(rank, rank)


class Means(Invariant):
    """Record the gradients in each push of a group; reports no violations itself.

    Args:
        roles: ranks by role.
        groups: ranks of the members of each.
        drops: whether a gradient may be dropped, and pushed again.
    """

    def __init__(self, roles: RoleAssignment, groups: Sequence[tuple[int, ...]], *, drops: bool) -> None:
        self._indices = {rank: index for index, rank in enumerate(roles.workers)}
        self._name_of = {rank: ranks[0] for ranks in groups for rank in ranks}
        self._there = {rank: ranks for ranks in groups for rank in ranks}
        self._behind: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._drops = drops

    def behind(self, server: int, name: int, step: int) -> tuple[int, ...]:
        """Return the indices of the workers in the mean that a group's gradient is; see `Ledger`."""
        ranks = self._behind.get((server, name, step), self._there.get(name, ()))
        return tuple(self._indices[rank] for rank in ranks)

    def regrouped(self, event: Regrouped) -> None:
        self._there[event.rank] = tuple(event.members)

    def handled(self, event: Handled) -> None:
        """Record the members of a mean that has arrived, or has arrived again after it was dropped."""
        message = event.message
        if message is None or message.kind is not Kind.PUSH:
            return
        key = event.server, self._name_of[event.source], message.step
        if key not in self._behind or (self._drops and message.step >= event.version_before):
            self._behind[key] = self._there[event.source]


def of_rounds(conditions: Conditions, steps: int) -> Conditions:
    """Return conditions in which a round stands for a step, and what a model moves by in it for a gradient.

    Args:
        conditions: conditions of the run.
        steps: steps of a round; the last of a run may have fewer.
    """
    # With dynamic batches, the length of a group's last round is not known beforehand.
    gradient = None if conditions.units and steps > 1 else conditions.gradient
    total = None if conditions.units else conditions.steps

    def moved(worker: int, number: int) -> Tensor:
        assert gradient is not None, "asked only where gradients are known"
        stop = (number + 1) * steps if total is None else min((number + 1) * steps, total)
        return torch.stack([gradient(worker, step) for step in range(number * steps, stop)]).sum(0)

    return replace(
        conditions,
        gradient=None if gradient is None else moved,
        steps=None if conditions.steps is None else -(-conditions.steps // steps),
    )


class InRounds(Filter):
    """Show another invariant rounds as steps; servers receive rounds only.

    Args:
        inner: the other invariant.
        steps: steps of a round.
    """

    def __init__(self, inner: Invariant, steps: int) -> None:
        super().__init__(inner)
        self._steps = steps

    def stepped(self, event: Stepped) -> None:
        if (event.step + 1) % self._steps == 0:
            self._inner.stepped(replace(event, step=event.step // self._steps))

    def ended(self, event: Ended) -> None:
        taken = event.taken
        if taken is not None:
            taken = {rank: -(-steps // self._steps) for rank, steps in taken.items()}
        self._inner.ended(replace(event, steps=-(-event.steps // self._steps), taken=taken))


class AtRoots(Invariant):
    """Roots hold the sum of the leaves' means, and every gradient that a leaf has taken is in one, on all shards.

    Args:
        conditions: conditions with known gradients.
        levels: workers, leaves and roots that belong together.
        drops: whether late means are dropped.
    """

    def __init__(self, conditions: Conditions, levels: Levels, *, drops: bool) -> None:
        roles = conditions.roles
        self._indices = {rank: index for index, rank in enumerate(roles.workers)}
        self._leaves, self._roots = set(levels.leaves), set(levels.roots)
        self._taken: defaultdict[int, set[int]] = defaultdict(set)
        self._behind: dict[tuple[int, int], tuple[int, ...]] = {}
        roots = replace(conditions, roles=RoleAssignment(roles.workers, levels.roots))
        self._ledger = Ledger(roots, self._members, drops=drops)

    def handled(self, event: Handled) -> None:
        """Note which workers are in a mean that a leaf makes, and check what roots do."""
        if event.server in self._leaves:
            self._note(event)
        elif event.server in self._roots:
            answers = [
                (to, reply._replace(kind=Kind.PARAMETERS) if reply.kind is Kind.VECTOR else reply)
                for to, reply in event.replies
            ]
            self._ledger.handled(replace(event, replies=answers))

    def _note(self, event: Handled) -> None:
        taken = self._taken[event.server]
        if event.message is not None and event.message.kind is Kind.PUSH:
            taken.add(self._indices[event.source])
        steps = {reply.step for _, reply in event.replies if reply.kind is Kind.PUSH}
        for step in steps:
            self._behind[event.server, step] = tuple(sorted(taken))
            taken.clear()

    def _members(self, root: int, leaf: int, step: int) -> tuple[int, ...]:
        return self._behind.get((leaf, step), ())


@invariants_for.register
def _(strategy: Hierarchical, conditions: Conditions) -> list[Invariant]:
    roles, levels = conditions.roles, Levels.of(conditions.roles, strategy.groups)
    traits, faults = strategy.traits(len(roles.workers)), strategy.faults(len(roles.workers))
    counted = not conditions.units
    steps = EveryStep(roles.workers, leaves_out=traits.skips_steps, skips=faults.continues, counted=counted)
    groups = [members for members in levels.groups if members]
    found = general(strategy, conditions, [steps])
    found.append(Replicas(replace(conditions, gradient=None), groups, alone=False))
    if traits.lockstep and strategy.overlap and conditions.buckets > 1:
        found.append(Undisturbed(LateReplicas(conditions, at_once=True)))
    elif traits.lockstep:
        found.append(Undisturbed(Replicas(conditions, [roles.workers], alone=True)))
    if conditions.gradient is not None:
        found.append(AtRoots(conditions, levels, drops=traits.skips_steps))
    return found


@invariants_for.register
def _(strategy: Mixed, conditions: Conditions) -> list[Invariant]:
    roles, workers = conditions.roles, len(conditions.roles.workers)
    traits, apart = strategy.traits(workers), strategy.faults(workers).regroups_apart
    steps, leaves_out, counted = traits.exchange_every, traits.skips_steps, not conditions.units
    groups, handling = strategy.members(roles), Handling(strategy.merge)
    exact = conditions if traits.exact_sums else replace(conditions, gradient=None)
    means = Means(roles, groups, drops=leaves_out)

    def serving_with(conditions: Conditions) -> list[Invariant]:
        return serving_invariants(
            of_rounds(conditions, steps),
            traits.pushers(roles),
            strategy.consistency,
            handling,
            in_step=traits.lockstep,
            behind=means.behind,
        )

    # The movement of a group in a round in which it loses a member depends on each member's progress.
    partly = apart and steps > 1
    serving = serving_with(replace(exact, gradient=None) if partly else exact)
    exactly = [each for each in serving_with(exact) if isinstance(each, Ledger)] if partly else []
    every_step: list[Invariant] = [
        OfMembers(
            EveryStep(ranks, leaves_out=leaves_out, regroups=apart, apart=apart, counted=counted), ranks
        )
        for ranks in groups
    ]
    found = general(strategy, conditions, every_step)
    # Before the servers' invariants: these ask it which workers are behind a push.
    found.append(means)
    found += [OfGroups(InRounds(invariant, steps), roles, groups) for invariant in serving]
    found += [Undisturbed(OfGroups(InRounds(each, steps), roles, groups)) for each in exactly]
    found.append(Meetings(Replicas(exact, groups, alone=False), every(steps)))
    if len(groups) == 1 and adds_up(handling):
        found.append(Undisturbed(Meetings(Replicas(exact, groups, alone=True), every(steps))))
    return found
