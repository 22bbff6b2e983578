"""A replica that is like no other: its state, and the mean of all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.state import State
from polyrhythm.training.optimizing.flat_optimizer import FlatOptimizer

_OPTIMIZER = "optimizer."


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
