"""Replicas of gossip strategies, different on all workers: their state, their mean, their resharding.

A run resumed with another number of workers restarts from the mean of the replicas, weighted by mass, with the mean of
their optimizers' momenta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.state import (
    Held,
    Merge,
    MergeFunction,
    Resharding,
    State,
    StateField,
    below,
    lockstep,
    mean_of_optimizers,
    own_steps,
    prefixed,
    without,
)
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizer_plan import OwnOptimizer
from polyrhythm.training.optimizer_state import weighted_mean

_OPTIMIZER, _ARRIVED = "optimizer.", "arrived."


def of_replicas(
    after: int, name: str, merge: Merge | MergeFunction = "mean", *more: StateField, together: bool
) -> Resharding:
    """Return the resharding of states made by `packed`.

    Args:
        after: new number of workers.
        name: name of a worker's parameters in its state.
        merge: function that computes the common starting point.
        more: other fields.
        together: whether all have done the same number of steps.
    """

    def remark(held: Held) -> str:
        missing = 0 if together else len(held.steps) - len(held.workers)
        return f"; {missing} sent none, and are assumed to be at the step of worker 0" if missing else ""

    fields = (
        StateField(name, merge, "run"),
        StateField("optimizer", mean_of_optimizers, "run"),
        *more,
    )
    return Resharding(
        after=after,
        text="all restart from the mean of {states} models and of their optimizers' momenta",
        remark=remark,
        workers=fields,
        count=lockstep if together else own_steps,
        parameters=name,
    )


def mean_by_mass(name: str, states: Sequence[State], weights: Sequence[float]) -> State:
    """Return the mean by mass of all workers' parameters, including received messages that are not applied yet.

    Args:
        name: name of the tensor of parameters times mass.
        states: states of all workers.
        weights: weights of the states, all 1; masses are the effective weights.
    """
    brought = []
    for tensors, _ in states:
        total = tensors[name].clone()
        for value in below(_ARRIVED, tensors).values():
            total.add_(value)
        brought.append(total)
    mass = sum(float(facts["mass"]) + sum(map(float, facts["arrived"])) for _, facts in states)
    point = weighted_mean(brought, weights, brought[0]).mul_(len(states) / mass)
    return {name: point}, {}


def mean_of_all(workers: Communicator, vector: Tensor) -> Tensor:
    """Return the mean of all workers' vectors, `(n,)`, the same bits everywhere. All workers must call it."""
    total = vector.clone()
    workers.all_reduce(total)
    return total.div_(workers.size)


def packed(
    tensors: dict[str, Tensor], facts: dict[str, Any], optimizer: FlatOptimizer | OwnOptimizer
) -> State:
    """Return a state of named tensors, facts and an optimizer's state."""
    of_optimizer, optimizer_facts = optimizer.state()
    named = prefixed(_OPTIMIZER, of_optimizer)
    return tensors | named, {**facts, "optimizer": optimizer_facts}


def unpacked(state: State, optimizer: FlatOptimizer | OwnOptimizer) -> State:
    """Restore an optimizer from what `packed` returned, and return the rest."""
    tensors, facts = state
    optimizer.load_state(below(_OPTIMIZER, tensors), facts["optimizer"])
    rest = without(_OPTIMIZER, tensors)
    return rest, {name: value for name, value in facts.items() if name != "optimizer"}
