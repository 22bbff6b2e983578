"""A replica of a gossip strategy, unlike all others: its state, the mean of all, its resharding.

With another number of workers all begin anew at the mean of what the replicas held, by their masses, with the
mean of their optimisers' momenta.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.state import Held, Merged, State
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.optimizer_state import mean_optimizer, weighted_mean

_OPTIMIZER, _ARRIVED = "optimizer.", "arrived."


class OfReplicas:
    """See `Resharding`; of states that `packed` has made.

    Args:
        name: of what a worker brings in its state: its parameters, multiplied by its mass if it has one.
        together: whether all have done equally many steps.
    """

    def __init__(self, name: str, *, together: bool) -> None:
        self._name = name
        self._together = together

    def counted(self, held: Held) -> list[int]:
        """All that each has done; of who had handed in no state, as many as worker 0 has."""
        known = {0} if self._together else set(held.workers)
        return [steps if worker in known else held.steps[0] for worker, steps in enumerate(held.steps)]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody gets the point at which those who are left would begin anew, with the mean of their momenta."""
        states = [held.workers[index] for index in sorted(held.workers)]
        brought = [self._brought(tensors) for tensors, _ in states]
        mass = sum(_mass(facts) for _, facts in states)
        point = weighted_mean(brought, [1.0] * len(states), brought[0]).mul_(len(states) / mass)
        momenta, optimizer = mean_optimizer(
            [(_below(_OPTIMIZER, tensors), facts["optimizer"]) for tensors, facts in states],
            [1.0] * len(states),
        )
        common = {self._name: point} | {_OPTIMIZER + name: value for name, value in momenta.items()}
        noted = {**states[0][1], "optimizer": optimizer}
        if "mass" in noted:
            noted |= {"mass": 1.0, "arrived": []}
        every: dict[int, State] = dict.fromkeys(range(workers), (common, noted))
        text = f"all begin anew at the mean of {len(states)} models, with that of their optimisers' momenta"
        missing = len(held.steps) - len(states)
        if missing and not self._together:
            text += f"; {missing} had handed in none, and count as having come as far as worker 0"
        return Merged(replace(held, parameters=point, workers=every), text)

    def _brought(self, tensors: dict[str, Tensor]) -> Tensor:
        """Gives what a worker holds, with what has been sent to it and does not count yet."""
        total = tensors[self._name].clone()
        for value in _below(_ARRIVED, tensors).values():
            total.add_(value)
        return total


def _mass(facts: dict[str, Any]) -> float:
    return float(facts.get("mass", 1.0)) + sum(map(float, facts.get("arrived", ())))


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def mean_of_all(workers: Communicator, vector: Tensor) -> Tensor:
    """Gives the mean of all workers' vectors, `(n,)`, the same bits everywhere. All workers must call it."""
    total = vector.clone()
    workers.all_reduce(total)
    return total.div_(workers.size)


def packed(tensors: dict[str, Tensor], facts: dict[str, Any], optimizer: FlatOptimizer) -> State:
    """Gives a state of named tensors, facts and an optimiser's state."""
    of_optimizer, optimizer_facts = optimizer.state()
    named = {_OPTIMIZER + name: value for name, value in of_optimizer.items()}
    return tensors | named, {**facts, "optimizer": optimizer_facts}


def unpacked(state: State, optimizer: FlatOptimizer) -> State:
    """Takes an optimiser's state out of what `packed` gave, and gives the rest."""
    tensors, facts = state
    inside = {
        name.removeprefix(_OPTIMIZER): value for name, value in tensors.items() if name.startswith(_OPTIMIZER)
    }
    optimizer.load_state(inside, facts["optimizer"])
    rest = {name: value for name, value in tensors.items() if not name.startswith(_OPTIMIZER)}
    return rest, {name: value for name, value in facts.items() if name != "optimizer"}
