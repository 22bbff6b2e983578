"""Which invariants a strategy must keep, by its traits and by the family it belongs to.

`invariants_for` dispatches on the class of the strategy: a derived strategy keeps the invariants of the class it
derives from, and one that is registered nowhere keeps those of `general` alone. A strategy of one's own registers
more beside its class or, better, beside its tests:

    @invariants_for.register
    def _(strategy: MyStrategy, conditions: Conditions) -> list[Invariant]:
        return [*general(strategy, conditions), Replicas(conditions, [conditions.roles.workers], alone=False)]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch

from polyrhythm.communication.message import Kind
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
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.verification.averaging import Elastic, LocalModels
from polyrhythm.verification.general import EveryBatch, EveryStep, Meetings, Progress, Undisturbed, Versions
from polyrhythm.verification.gossip import Exchanges, MatrixMixing
from polyrhythm.verification.groups import AtRoots, InRounds, Means, OfGroups, OfMembers, of_rounds
from polyrhythm.verification.invariant import Conditions, Invariant
from polyrhythm.verification.replicas import LateReplicas, OneVector, Replicas
from polyrhythm.verification.servers import (
    Answers,
    Batches,
    Ledger,
    OfShards,
    Sums,
    adds_up,
    serving_invariants,
)
from polyrhythm.verification.sites import Sites


def general(
    strategy: Strategy, conditions: Conditions, every_step: list[Invariant] | None = None
) -> list[Invariant]:
    """Return what every strategy must keep: progress, monotone versions, and every step taken in its turn.

    Args:
        strategy: whose traits decide what a step may leave out.
        conditions: of the run.
        every_step: what takes the place of `EveryStep` over all workers.
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
    """Return what must hold after every event of a run of this strategy.

    Args:
        strategy: of the run.
        conditions: of the run.
    """
    return general(strategy, conditions)


# All-reduce: replicas


@invariants_for.register
def _(strategy: Synchronous, conditions: Conditions) -> list[Invariant]:
    workers = conditions.roles.workers
    replicas = Replicas(conditions, [workers], alone=strategy.traits(len(workers)).exact_sums)
    return [*general(strategy, conditions), replicas]


@invariants_for.register
def _(strategy: LazySynchronous, conditions: Conditions) -> list[Invariant]:
    return [*general(strategy, conditions), LateReplicas(conditions)]


# Averaging: models of one's own, equal at the end of a round


def _meets(strategy: Averaging, conditions: Conditions) -> Callable[[int], bool]:
    """Return what tells, from a step's number, whether all replicas are equal after it."""
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
    pushers = strategy.traits(len(conditions.roles.workers)).pushers(conditions.roles)
    in_step = consistency.in_step()
    found = general(strategy, conditions)
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
    return found if conditions.gradient is None else [*found, Sums(conditions)]


@invariants_for.register
def _(strategy: Sandblaster, conditions: Conditions) -> list[Invariant]:
    replicas = Replicas(conditions, [conditions.roles.workers], alone=False)
    answers = Answers(conditions.roles, (Kind.PULL, Kind.PUSH))
    together = Undisturbed(Meetings(replicas, every(strategy.portions)))
    return [*general(strategy, conditions), answers, Batches(conditions.roles), together]


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


@invariants_for.register
def _(strategy: Hogwild, conditions: Conditions) -> list[Invariant]:
    found = general(strategy, conditions)
    return found if conditions.gradient is None else [*found, OneVector(conditions)]


@invariants_for.register
def _(strategy: Gaia, conditions: Conditions) -> list[Invariant]:
    sites = SiteMap.of(conditions.roles, strategy.sites)
    return [*general(strategy, conditions), Sites(conditions, sites, strategy.lag)]


# Groups in front of servers


@invariants_for.register
def _(strategy: Hierarchical, conditions: Conditions) -> list[Invariant]:
    roles, levels = conditions.roles, Levels.of(conditions.roles, strategy.groups)
    traits, faults = strategy.traits(len(roles.workers)), strategy.faults(len(roles.workers))
    counted = not conditions.units
    steps = EveryStep(roles.workers, leaves_out=traits.skips_steps, skips=faults.goes_on, counted=counted)
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

    # What a group moves by in a round in which it loses somebody depends on how far each member had come.
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
