"""States of servers, for another number of workers (`of_servers`) or another number of servers (`recut`).

With another number of pushers, the counts of each begin again, and all else stays:

    applied ─▶ counts         held, or dropped with its pusher ─▶ its images are dealt out again
    optimizer, version, staleness ─▶ stay        clocks ─▶ all at the common first step

With another number of servers, what there is for every number (parameters, momenta, gradients that are held)
is cut again with it, bit for bit. What a server counts (versions, steps, clocks) is the same on all, where
workers are in lockstep or all have stopped; otherwise the largest counts. Steps left out of a shard go to the
new shards that have most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.push_pull import ServedWorker
from polyrhythm.strategies.resharding import EVERYTHING_OF_SERVER, Held, Resharding, begun
from polyrhythm.strategies.state import Conversion, Part, Start, State, StateField, below, prefixed, reset
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizer_state import recut_optimizer


def of_servers(
    consistency: Consistency,
    before: Sequence[tuple[int, ...]],
    workers: int,
    pushers: int,
    *,
    round_steps: int = 1,
) -> Resharding:
    """Return how servers that own the optimizer are resharded: they count other pushers.

    Args:
        consistency: consistency of the servers' gates.
        before: indices of the workers in the mean that each pusher pushed.
        workers: number of workers.
        pushers: number of workers that push.
        round_steps: steps of a worker that servers count as one.
    """

    def applied(held: Held) -> list[int]:
        """Count the gradients that a server has applied, or that are over; on the server with the most."""
        found = [0] * len(held.steps)
        for pusher, members in enumerate(before):
            steps = max(_applied(facts)[pusher] for _, facts in _serving(held))
            for worker in members:
                found[worker] = steps * round_steps
        return found

    def gate(start: Start) -> dict[str, Any]:
        """Return the state of a gate where all pushers begin with a step, without held gradients."""
        return begun(consistency.gate(pushers).fields, Start(start.step // round_steps, 0, pushers))

    servers = (
        StateField("held", Part, reset([], "server")),
        StateField("seen", Part, Conversion("reset", "server")),
        StateField("merge", Part, Conversion("keep", "pusher")),
        StateField("steps", list[int], reset(lambda start: start.step // round_steps, "pusher")),
        StateField("left_out", dict[int, list[list[int]]], reset({}, "server")),
        StateField("gate", Part, reset(gate, "server")),
        EVERYTHING_OF_SERVER,
    )
    return Resharding(
        after=workers,
        text="the servers continue with their parameters and optimizers, and count all steps from 0",
        remark=_left_out,
        workers=ServedWorker.fields,
        servers=servers,
        count=applied,
        pushers=lambda server: pushers,
    )


def _left_out(held: Held) -> str:
    serving = _serving(held)
    again = round(sum(len(facts["held"]) for _, facts in serving) / len(serving))
    columns = zip(*(_applied(facts) for _, facts in serving), strict=True)
    apart = sum(max(steps) - min(steps) for steps in columns)
    text = ""
    if again:
        text += f"; {again} gradients that they held, of no update yet, are dropped and computed again"
    return text + (f"; {apart} gradients that not all servers had yet count as applied" if apart else "")


def _serving(held: Held) -> list[State]:
    return [state for state in held.servers if state[1]]


def _applied(facts: dict[str, Any]) -> list[int]:
    """Return how many steps of each pusher are applied or over; what is held of one are its last."""
    found = list(facts["steps"])
    for pusher, *_ in facts["held"]:
        found[pusher] -= 1
    return found


_OPTIMIZER = "optimizer."


def recut(states: Sequence[State], plan: OptimizerPlan, servers: int) -> list[State]:
    """Return the states of another number of servers, from those of all, in the order of their shards.

    Raise `RequestError` if servers hold gradients of different steps.
    """
    _check_held(states)
    sizes = [len(tensors["values"]) for tensors, _ in states]
    before = shards(sum(sizes), len(states))
    packed = [(below(_OPTIMIZER, tensors), facts["optimizer"]) for tensors, facts in states]
    wholes = _wholes(states, sizes)
    newest = max((facts for _, facts in states), key=lambda facts: int(facts["version"]))
    found: list[State] = []
    for shard in shards(sum(sizes), servers):
        optimizer, optimizer_facts = recut_optimizer(packed, plan, before, shard)
        tensors = {name: whole[shard].clone() for name, whole in wholes.items()}
        tensors |= prefixed(_OPTIMIZER, optimizer)
        facts = newest | {
            "optimizer": optimizer_facts,
            "steps": [max(steps) for steps in zip(*(facts["steps"] for _, facts in states), strict=True)],
            "gate": _latest([facts["gate"] for _, facts in states]),
            "left_out": _nearest(shard, before, states),
        }
        found.append((tensors, facts))
    return found


def _wholes(states: Sequence[State], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Join what there is for every number; zeros where a server has none, as such state begins."""
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
    """Return the state of a gate that is as far as the furthest: its clocks or its step."""
    found = dict(gates[0])
    for gate in gates[1:]:
        for key, value in gate.items():
            known = found[key]
            found[key] = [*map(max, known, value)] if isinstance(value, list) else max(known, value)
    return found


def _nearest(shard: slice, before: Sequence[slice], states: Sequence[State]) -> dict[str, Any]:
    """Return the left-out steps of a new shard: those of the old one with the largest overlap."""
    shared = [min(shard.stop, old.stop) - max(shard.start, old.start) for old in before]
    return dict(states[shared.index(max(shared))][1].get("left_out", {}))


def _check_held(states: Sequence[State]) -> None:
    held = [[(pusher, step) for pusher, _, step, *_ in facts["held"]] for _, facts in states]
    if any(entries != held[0] for entries in held):
        raise RequestError(
            f"the {len(states)} servers of the checkpoint hold gradients of different steps, and no complete one "
            "can be made: resume with as many servers"
        )
