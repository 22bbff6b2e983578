"""The states of servers, cut anew for another number of them.

What there is for every number (parameters, momenta, gradients that are held) goes along with it, bit for bit. What a
server counts (versions, steps, clocks) is the same on all, where workers go in step or all have stopped; else the
largest counts. Which steps were left out of a shard goes to the new ones that have most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizing.recut_optimizer import recut_optimizer

_OPTIMIZER = "optimizer."


def recut(states: Sequence[State], plan: OptimizerPlan, servers: int) -> list[State]:
    """Gives the states of another number of servers.

    Args:
        states: of all servers, in the order of their shards.
        plan: of the whole optimiser.
        servers: how many there are now.

    Raises:
        RequestError: servers hold gradients of different steps.
    """
    _check_held(states)
    sizes = [len(tensors["values"]) for tensors, _ in states]
    before = shards(sum(sizes), len(states))
    packed = [(_below(_OPTIMIZER, tensors), facts["optimizer"]) for tensors, facts in states]
    wholes = _wholes(states, sizes)
    newest = max((facts for _, facts in states), key=lambda facts: int(facts["version"]))
    found: list[State] = []
    for shard in shards(sum(sizes), servers):
        optimizer, optimizer_facts = recut_optimizer(packed, plan, before, shard)
        tensors = {name: whole[shard].clone() for name, whole in wholes.items()}
        tensors |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
        facts = newest | {
            "optimizer": optimizer_facts,
            "steps": [max(steps) for steps in zip(*(facts["steps"] for _, facts in states), strict=True)],
            "gate": _latest([facts["gate"] for _, facts in states]),
            "left_out": _nearest(shard, before, states),
        }
        found.append((tensors, facts))
    return found


def _wholes(states: Sequence[State], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Joins what there is for every number; zeros where a server has none, as such state begins."""
    names = dict.fromkeys(
        name for tensors, _ in states for name in tensors if not name.startswith(_OPTIMIZER)
    )
    joined = {}
    for name in names:
        parts = [tensors.get(name) for tensors, _ in states]
        like = next(part for part in parts if part is not None)
        joined[name] = torch.cat(
            [like.new_zeros(size) if part is None else part for part, size in zip(parts, sizes, strict=True)]
        )
    return joined


def _latest(gates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gives the state of a gate that is as far as the furthest: its clocks or its step."""
    found = dict(gates[0])
    for gate in gates[1:]:
        for key, value in gate.items():
            known = found[key]
            found[key] = [*map(max, known, value)] if isinstance(value, list) else max(known, value)
    return found


def _nearest(shard: slice, before: Sequence[slice], states: Sequence[State]) -> dict[str, Any]:
    """Gives which steps were left out of a new shard: as of the old one of which it has the most."""
    shared = [min(shard.stop, old.stop) - max(shard.start, old.start) for old in before]
    return dict(states[shared.index(max(shared))][1].get("left_out", {}))


def _check_held(states: Sequence[State]) -> None:
    held = [[(pusher, step) for pusher, _, step, *_ in facts["held"]] for _, facts in states]
    if any(entries != held[0] for entries in held):
        raise RequestError(
            f"the {len(states)} servers of the checkpoint hold gradients of different steps, of which no whole one "
            "can be made: resume with as many servers"
        )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
