"""The complete state of a run of users' own loops: one dict with the state of all workers and servers.

    each worker   part of the strategy, buffers, generators, positions in shards ─▶ rank 0 ◀── shards ── servers
    run_state     {"model", "workers", "servers", …}                        tensors, numbers, strings, lists and dicts
    resume        ─▶ same number of workers: each gets its own state
                  ─▶ another number: merged by the strategy's rule for checkpoints (`Resharding`); the rest of the
                     epoch is distributed among them
                  ─▶ another strategy: continues from the model and the optimizer (`checkpointing/handing_over.py`)

The dict is plain data: `torch.save` writes it, and `torch.load` reads it with `weights_only`. `loop_storage` writes it
as a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.api.loop.coordination import Coordination
from polyrhythm.api.loop.distributed_optimizer import DistributedOptimizer
from polyrhythm.api.loop.epochs import Begun
from polyrhythm.api.loop.position import Kept, LoopProgress, plain_state, take_state
from polyrhythm.api.loop.random_state import RandomStateToRestore, random_state
from polyrhythm.api.loop.shard import merged_places
from polyrhythm.errors import RequestError
from polyrhythm.roles.checkpointing.handing_over import begun_with, learned_from
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState, counted, held_by, server_facts
from polyrhythm.roles.replica import Replica
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.resharding import Held
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import RecutsServers, Strategy
from polyrhythm.training.checkpoint import restoring
from polyrhythm.training.flat_optimizer import Packed, check_options
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

FORMAT = 1
_FIELDS = (
    "strategy",
    "workers",
    "model",
    "optimizer",
    "epoch",
    "states",
    "servers",
    "kept",
    "kept_by_epochs",
)


def worker_state(
    replica: Replica, optimizer: DistributedOptimizer, progress: LoopProgress, *, counts_epochs: bool
) -> WorkerState:
    """Return the state of this worker, after settling its optimizer.

    Args:
        replica: replica of this worker.
        optimizer: optimizer of this worker.
        progress: progress of its loop.
        counts_epochs: whether `group.epochs` knows the current epoch, so that the code after its last batch is still
            run; else the loop counts by itself.

    Raises:
        RequestError: a step is in progress.
    """
    if optimizer.gradients.pending:
        raise RequestError(
            "there are gradients that no step has used yet, which are not saved: call group.state_dict after "
            "optimizer.step()"
        )
    staleness = {str(age): count for age, count in replica.part.staleness.items()}
    worker, steps = replica.workers.rank, optimizer.steps
    account = Account(worker, steps, steps, 0, 0, 0.0, replica.bytes_sent, staleness)
    loop = {
        "random": random_state(replica.flat.vector.device),
        "shards": progress.shard_states(ends=not counts_epochs),
    }
    return replace(WorkerState.of(replica, account, {}), loop=loop)


def run_state(
    strategy: Strategy,
    model: nn.Module,
    optimizer: DistributedOptimizer,
    coordination: Coordination,
    workers: int,
    kept: Sequence[Kept],
) -> dict[str, Any]:
    """Return the state of a run without those of its workers and servers (`with_ranks`), on the coordinator.

    Args:
        strategy: strategy of the run.
        model: model of this worker.
        optimizer: optimizer of this worker.
        coordination: coordination of its loop.
        workers: number of workers, including failed ones.
        kept: objects of the loop, such as schedulers.
    """
    begun = coordination.next_epoch
    return {
        "format": FORMAT,
        "strategy": str(strategy),
        "workers": workers,
        "steps": optimizer.steps,
        "epoch": [begun.loop, begun.epoch],
        "model": {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.settings(),
        "kept": [plain_state(each, tensors=True) for each in kept],
        "kept_by_epochs": [plain_state(each, tensors=True) for each in coordination.loop_progress.kept],
    }


@restoring("the state")
def resume(
    state: dict[str, Any],
    strategy: Strategy,
    replica: Replica,
    optimizer: DistributedOptimizer,
    coordination: Coordination,
    kept: Sequence[Kept],
    *,
    succeeds: bool,
) -> str:
    """Resume a run; all workers call it.

    Args:
        state: result of `run_state`.
        strategy: strategy of this run.
        replica: replica of this worker, not started yet.
        optimizer: optimizer of this worker.
        coordination: coordination of its loop.
        kept: objects in the number and order in which they were given to `run_state`.
        succeeds: whether this worker is a replacement, which learns its position from the others.

    Returns:
        Message on a changed number of workers or servers; may be empty.

    Raises:
        RequestError: the state is of another model, or damaged.
    """
    _check(state, strategy, replica, optimizer, kept)
    before, workers, worker = counted(state["workers"]), replica.workers.size, replica.workers.rank
    states = {
        int(index): WorkerState.from_tensors(each["tensors"], each["facts"])
        for index, each in state["states"].items()
    }
    own = states.get(worker, states[0])
    places = own.loop["shards"] if before == workers else _places(states, before)
    device = replica.flat.vector.device
    random = RandomStateToRestore(
        own.loop["random"] if worker in states and worker < before else random_state(device), device
    )
    coordination.loop_progress.resume(places, random)
    coordination.loop_progress.received = state["kept_by_epochs"]
    loop, epoch = map(counted, state["epoch"])
    coordination.epochs.resumed = Begun(loop, epoch, counted(state["steps"]))
    for each, received in zip(kept, state["kept"], strict=True):
        take_state(each, received)
    if succeeds:
        return ""
    replica.model.load_state_dict(state["model"])
    replica.flat.gather_parameters()
    servers = [(each["tensors"], server_facts(each["facts"])) for each in state["servers"]]
    text = ""
    other = None if _continues_from(strategy, state["strategy"]) else _strategy(state["strategy"])
    if replica.part.replicated:
        own = replace(own, part=states[0].part, part_facts=states[0].part_facts)
    if other is not None or before != workers:
        held = held_by(states, before, replica.flat.vector.detach().clone(), servers)
        if other is None:
            own, servers, text = _merged(states, held, strategy, replica)
        else:
            own, servers, text = _adopted(states, held, other, strategy, replica, optimizer)
    if other is None and isinstance(strategy, RecutsServers):
        cut = strategy.recut(servers, replica.plan)
        if len(cut) != len(servers):
            text += f"; the shards of {len(servers)} servers are divided again for {len(cut)}"
        servers = cut
    own.return_batches(replica)
    optimizer.begin_with(state["optimizer"], own.account.step, servers)
    for name, value in replica.buffers.items():  # at the start they are worker 0's
        if name in own.buffers:
            value.copy_(own.buffers[name])
    random.restore()
    return text.removeprefix("; ")


def _check(
    state: dict[str, Any],
    strategy: Strategy,
    replica: Replica,
    optimizer: DistributedOptimizer,
    kept: Sequence[Kept],
) -> None:
    if optimizer.has_begun:
        raise RequestError("training has begun: call group.load_state_dict right after group.distribute")
    if state.get("format") != FORMAT or not all(field in state for field in _FIELDS):
        raise RequestError(
            "this is no state of a run: give what group.state_dict returned on the worker that leads"
            if state
            else "the state is empty: group.state_dict returns it on the worker that leads (group.leads)"
        )
    if state["strategy"] != str(strategy):
        _strategy(state["strategy"])
    if len(state["kept"]) != len(kept):
        raise RequestError(
            f"{len(state['kept'])} objects were given to group.state_dict, and {len(kept)} here: give the same"
        )
    groups = state["optimizer"]["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise RequestError(
            f"the state has {len(groups)} param groups, the optimizer {len(optimizer.param_groups)}: make it as it was"
        )
    check_options("optimizer", optimizer.param_groups, groups)
    own = {name: tuple(value.shape) for name, value in replica.model.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in state["model"].items()}
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            raise RequestError(
                f"{name} is {_shape(saved.get(name))} in the state and {_shape(own.get(name))} in the model: make the "
                "model as it was"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _strategy(spec: str) -> Strategy:
    """Return the strategy of a state.

    Raises:
        RequestError: there is no such strategy any more.
    """
    found = build("strategy", spec, *FAMILIES)
    assert isinstance(found, Strategy), "families hold strategies"
    return found.in_own_loop()


def _continues_from(strategy: Strategy, before: str) -> bool:
    if before == str(strategy):
        return True
    found = _strategy(before)
    return strategy == found or (isinstance(strategy, RecutsServers) and strategy.continues_from(found))


def _places(states: dict[int, WorkerState], before: int) -> list[dict[str, Any]]:
    """Return the positions in all shards for another number of workers."""
    shards = [states.get(worker, states[0]).loop["shards"] for worker in range(before)]
    return [merged_places(of_one) if of_one[0] else {} for of_one in zip(*shards, strict=True)]


def _merged(
    states: dict[int, WorkerState], held: Held, strategy: Strategy, replica: Replica
) -> tuple[WorkerState, list[State], str]:
    """Return this worker's state and the servers', resharded for the current number, and a message."""
    workers, worker, before = replica.workers.size, replica.workers.rank, len(held.steps)
    step = max(held.steps)
    merged = strategy.resharding(before, workers).merged(held, step)
    replica.flat.vector.copy_(merged.held.parameters)
    replica.flat.spread_parameters()
    own = states.get(worker, states[0])
    staleness = own.account.staleness if worker in states else {}
    account = replace(own.account, worker=worker, step=step, staleness=staleness)
    part, facts = merged.held.workers.get(worker, ({}, {}))
    text = f"resumed with {workers} workers in place of {before}: {merged.text}"
    return replace(own, account=account, part=part, part_facts=facts), list(merged.held.servers), text


def _adopted(
    states: dict[int, WorkerState],
    held: Held,
    old: Strategy,
    strategy: Strategy,
    replica: Replica,
    optimizer: DistributedOptimizer,
) -> tuple[WorkerState, list[State], str]:
    """Return this worker's state and the servers', converted from another strategy's, and a message."""
    workers, worker, flat = replica.workers.size, replica.workers.rank, replica.flat
    learned = learned_from(held, old)
    if learned.pieces == (slice(0, len(flat.vector)),):  # maybe by the user's own optimizer object
        of_spans = _of_spans(*learned.packed[0], optimizer, flat, replica.plan)
        learned = replace(learned, packed=(of_spans,))
    flat.vector.copy_(learned.parameters)
    flat.spread_parameters()
    before, step = len(held.steps), max(held.steps)
    of_workers, of_servers, kept = begun_with(
        learned, strategy, workers, lambda: FlatParameters(_like(replica.model)), replica.plan, step
    )
    own = states.get(worker, states[0])
    part, facts = of_workers.get(0 if replica.part.replicated else worker, ({}, {}))
    account = replace(own.account, worker=worker, step=step, staleness={})
    momenta = "with its optimizer's state" if kept else "without an optimizer's state"
    text = f"{strategy} continues from the model of {old}, {momenta}"
    if workers != before:
        text += f", with {workers} workers in place of {before}"
    return replace(own, account=account, part=part, part_facts=facts), of_servers, text


def _of_spans(
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    optimizer: DistributedOptimizer,
    flat: FlatParameters,
    plan: OptimizerPlan,
) -> Packed:
    """Return an optimizer's state per parameter as state of a plan's spans; state of spans is returned unchanged."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if [shape for group in facts["shapes"] for shape in group] != [list(each.shape) for each in parameters]:
        return tensors, facts
    places = {id(view.parameter): (view.start, view.stop) for view in flat.views}
    joined: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        start, stop = places[id(parameter)]
        number, span = next(
            (number, span) for number, span in enumerate(plan.spans) if span.start <= start < span.stop
        )
        values.setdefault(str(number), {}).update(facts["state"].get(str(index), {}))
        prefix = f"state.{index}."
        for name, value in tensors.items():
            if not name.startswith(prefix):
                continue
            key = f"state.{number}.{name.removeprefix(prefix)}"
            if value.shape != parameter.shape:
                joined.setdefault(key, value)
                continue
            whole = joined.setdefault(key, torch.zeros(span.stop - span.start, dtype=value.dtype))
            whole[start - span.start : stop - span.start] = value.reshape(-1)
    shapes = [[[span.stop - span.start]] for span in plan.spans]
    groups = [dict(span.options) for span in plan.spans]
    packed = {"optimizer": facts["optimizer"], "state": values, "groups": groups, "shapes": shapes}
    return joined, packed


def _like(model: nn.Module) -> nn.Module:
    """Return a module with parameters like a model's, in their order, without its hooks."""
    return nn.ParameterList(
        nn.Parameter(each.detach().clone(), requires_grad=each.requires_grad) for each in model.parameters()
    )
