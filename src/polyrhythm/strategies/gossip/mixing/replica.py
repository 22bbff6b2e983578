"""Means of the replicas of gossip strategies, which differ between workers.

A run resumed with another number of workers restarts from the mean of the replicas, weighted by mass, with the mean of
their optimizers' momenta.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.state import State, below
from polyrhythm.training.optimizer_state import weighted_mean

_ARRIVED = "arrived."


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
