"""States of servers, for another number of workers (`OfServers`) or another number of servers (`recut`).

With another number of pushers, the counts of each begin anew, and all else stays:

    applied ─▶ counts         held, or dropped with its pusher ─▶ its images are dealt out again
    optimiser, version, staleness ─▶ stay        clocks ─▶ all at the step that everybody begins with

`steps_known` and `all_at` are for servers that count steps by worker.

With another number of servers, what there is for every number (parameters, momenta, gradients that are held)
is cut anew with it, bit for bit. What a server counts (versions, steps, clocks) is the same on all, where
workers are in lockstep or all have stopped; otherwise the largest counts. Steps left out of a shard go to the
new shards that have most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.state import Held, Merged, State
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizer_state import recut_optimizer

_HELD, _MERGER = ("held.", "seen."), "merge."


class OfServers:
    """See `Resharding`.

    Args:
        consistency: of the servers' gates.
        before: the indices of the workers whose mean each pusher pushed.
        after: how many pushers there are.
    """

    def __init__(self, consistency: Consistency, before: Sequence[tuple[int, ...]], after: int) -> None:
        self._consistency = consistency
        self._before = before
        self._after = after

    def counted(self, held: Held) -> list[int]:
        """Those whose gradients a server has applied, or that are over; on whichever server most are."""
        found = [0] * len(held.steps)
        for pusher, members in enumerate(self._before):
            applied = max(_applied(facts)[pusher] for _, facts in _serving(held))
            for worker in members:
                found[worker] = applied
        return found

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Who was there keeps what servers know of it beside its steps; who is new begins with their parameters."""
        servers = [self._server(state, step) for state in held.servers]
        own = {index: state for index, state in held.workers.items() if index < workers}
        return Merged(replace(held, workers=own, servers=servers), self._text(held))

    def _server(self, state: State, step: int) -> State:
        tensors, facts = state
        if not facts:  # it holds nothing between steps
            return state
        kept = {name: value for name, value in tensors.items() if not self._is_gone(name)}
        return kept, facts | {
            "steps": [step] * self._after,
            "held": [],
            "left_out": {},
            "gate": self._consistency.all_at(self._after, step),
        }

    def _is_gone(self, name: str) -> bool:
        number = name.removeprefix(_MERGER)
        return name.startswith(_HELD) or (name != number and number.isdigit() and int(number) >= self._after)

    def _text(self, held: Held) -> str:
        serving = _serving(held)
        again = round(sum(len(facts["held"]) for _, facts in serving) / len(serving))
        columns = zip(*(_applied(facts) for _, facts in serving), strict=True)
        apart = sum(max(steps) - min(steps) for steps in columns)
        text = "the servers go on with their parameters and optimisers, and count everybody's steps anew"
        if again:
            text += f"; {again} gradients that they held, of no update yet, are left out and computed again"
        return text + (f"; {apart} gradients that not all servers had yet count as applied" if apart else "")


def _serving(held: Held) -> list[State]:
    return [state for state in held.servers if state[1]]


def _applied(facts: dict[str, Any]) -> list[int]:
    """Gives how many steps of each pusher are applied or over; what is held of one are its last."""
    found = list(facts["steps"])
    for pusher, *_ in facts["held"]:
        found[pusher] -= 1
    return found


def steps_known(servers: Sequence[State]) -> list[tuple[int, ...]]:
    """Gives, for each worker, how many of its steps every server knows of."""
    return list(zip(*(facts["steps"] for _, facts in servers), strict=True))


def all_at(servers: Sequence[State], workers: int, step: int) -> list[State]:
    """Gives the states of servers that know of so many workers, all of them at one step."""
    return [(tensors, facts | {"steps": [step] * workers}) for tensors, facts in servers]


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
