"""The optimiser that a user's loop calls: it exchanges the gradients, and the strategy does the rest.

Lazy start: a replica starts at its model's first use in training. Replicas become equal when they start, and
servers get their parameters then. So the start waits as long as it can, and weights and states that are
loaded after `distribute` still count.

Step retry: a step is repeated with a copy of its gradients when another worker is lost in the middle of it.

    backward ─▶ kept: a copy ─▶ exchange ✝ ─▶ regroup ─▶ kept ─▶ exchange, with the remaining workers

A user's loop cannot be asked to compute the gradients again, and an exchange that broke may have changed some
of them.

Saved states: the leader asks the servers for their side of a saved optimiser, and sends it back when a state
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

import torch
from torch import nn

from polyrhythm.api.loop.shard import StepWeight
from polyrhythm.errors import RequestError
from polyrhythm.roles.control_messages import ShardState
from polyrhythm.roles.replica import FlatReplica, Replica
from polyrhythm.roles.trainer import StepRetry
from polyrhythm.roles.world import World
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.state import State
from polyrhythm.strategies.worker_part import Step


class LazyStart:
    """Starts a replica once, at its model's first use in training.

    Args:
        replica: all workers' must start at the same place of their programs.
        begin: starts it with those of the others, at a step; returns the step where it has started.

    Attributes:
        step: where the replica starts; then where it has started.
        past: whether it has started.
    """

    def __init__(self, replica: Replica, begin: Callable[[int], int]) -> None:
        self.step = 0
        self.past = False
        self._begin = begin
        used = [module for module in replica.model.modules() if list(module.parameters(recurse=False))]
        self._hooks = [module.register_forward_pre_hook(self._on_use) for module in used]

    def now(self) -> bool:
        """Start the replica, unless it has started; return whether it has done so now."""
        if self.past:
            return False
        self.past = True
        for hook in self._hooks:
            hook.remove()
        self.step = self._begin(self.step)
        return True

    def in_training(self) -> None:
        """Start the replica if this is no evaluation, which a single worker may do on its own."""
        if torch.is_grad_enabled():
            self.now()

    def _on_use(self, module: nn.Module, inputs: object) -> None:
        if module.training:
            self.in_training()


class ServerStates:
    """The leader's way to them.

    Args:
        world: where the leader is.
        faults: says which server has what.
        ask: asks for the state of every shard.
    """

    def __init__(self, world: World, faults: FaultPolicy, ask: Callable[[], list[State]]) -> None:
        self._world = world
        self._faults = faults
        self._ask = ask

    def ask(self) -> list[dict[str, Any]]:
        """Asks for the state of every shard: tensors by name, and facts."""
        return [{"tensors": tensors, "facts": facts} for tensors, facts in self._ask()]

    def give(self, states: list[dict[str, Any]]) -> None:
        """Gives every server the states of the shards that it holds; before training begins."""
        for server, rank in enumerate(self._world.cast.servers):
            for shard in self._faults.shards_of(server):
                state = ShardState(shard, states[shard]["tensors"], states[shard]["facts"])
                self._world.network.send(rank, state.message())


class DistributedOptimizer(torch.optim.Optimizer):
    """Stands for a user's optimiser, which the strategy runs on workers or servers.

    It has the same `param_groups`, so schedulers of the one and of the other change both. During training only
    learning rates may change, and those of several groups must keep their ratio. After a step all gradients are zero.

    Args:
        optimizer: the user's.
        steps: takes the steps of the replica that it trains.
        lazy_start: when the replica starts.
        weight: knows how much the next step counts.
        strategy: the strategy's spec, for saved states.
        servers: their side of saved states, on the worker that leads.

    Attributes:
        over: whether the run has ended.
        steps: that this worker has done.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: StepRetry,
        lazy_start: LazyStart,
        weight: StepWeight,
        strategy: str,
        servers: ServerStates | None = None,
    ) -> None:
        self._closed = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the list itself, not only its groups
        self._closed = True
        self._lazy_start = lazy_start
        self.over = False
        self.steps = 0
        self._goes_on_with = 0
        self._epoch_began_at = 0
        self._steps = steps
        self._replica = steps.trainer.replica
        self._weight = weight
        self._strategy = strategy
        self._servers = servers
        self._options = [_options(group) for group in self.param_groups]
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._lead = _first_in_vector(self.param_groups, self._replica)
        if self._rates[self._lead] == 0 and any(self._rates):
            raise RequestError(
                f"param group {self._lead} has learning rate 0 and another has not, so their ratio is unknown: make "
                "the scheduler after group.distribute"
            )
        # A scheduler of the user's own optimiser watches whether that one steps, and would warn that it does not.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchanges the gradients and updates the parameters, as the strategy does.

        Where the others have not waited for this worker (`backup_workers`), steps are left out until it is where they
        are: they change nothing, so that all loops end after as many.

        Args:
            closure: computes the loss and its gradients; called once, first.

        Returns:
            What the closure gave.

        Raises:
            RequestError: an option other than the learning rate has changed, or a ratio of learning rates; or the run
                is over.
            RunError: a rank is gone.
        """
        if self.over:
            raise RequestError("the run is over: call optimizer.step inside the `with` of polyrhythm.join")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rate = self._learning_rate()
        weight = self._weight.take()
        if self.start() and self._replica.workers.rank > 0:
            weight = 0.0  # this gradient was computed before this worker had worker 0's parameters
        left_out = self.steps < self._goes_on_with
        if weight == 0 or left_out:
            self.zero_grad()
        if not left_out:
            self._steps.take(Step(self.steps, weight), rate)
            self._goes_on_with = self._replica.part.next_step(self.steps)
        self.steps += 1
        return loss

    def settle(self) -> None:
        """Finishes what is under way, so that the parameters hold all steps so far.

        A forward pass and `state_dict` do so by themselves. It is for programs that read parameters directly, with a
        strategy that updates them only just before their use.
        """
        self._steps.guard(self._replica.settle)

    def start(self) -> bool:
        """Starts the replica if it has not started; gives whether it has done so now."""
        if not self._lazy_start.now():
            return False
        self.steps = self._epoch_began_at = self._lazy_start.step
        return True

    def begin_epoch(self) -> None:
        """Readies the replica for an epoch: its first, or one more, before which a user may have been evaluating."""
        if self.start() or self.steps == self._epoch_began_at:
            return
        self.settle()
        self._steps.guard(self._replica.part.catch_up)
        self._epoch_began_at = self.steps

    def go_on_at(self, step: int) -> None:
        """Goes on with a step at which the others are, whatever this worker, a successor, was told at its start."""
        self.steps = self._lazy_start.step = self._epoch_began_at = step
        self._steps.trainer.step = step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets all gradients to zero in place; they are never None, whatever `set_to_none` says."""
        self._replica.flat.gather_gradients()
        self._replica.flat.zero_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Gives this worker's state: the options of all groups, and what its strategy needs to go on.

        That of the worker that leads holds the servers' as well (parameters, optimisers, clocks) while a run goes on.

        Returns:
            Tensors, numbers and texts in dicts and lists, which `torch.load` reads with `weights_only`.
        """
        tensors, facts = self._replica.part.state()
        servers = []
        if self._servers is not None and self._lazy_start.past and not self.over:
            self._replica.part.check_servers()
            servers = self._servers.ask()
        return {
            "servers": servers,
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            "strategy": self._strategy,
            "steps": self.steps,
            "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
            "facts": facts,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; every worker must, before its first step.

        Where it is the leader's, servers go on from theirs: their parameters then count, not those of worker 0.

        Raises:
            RequestError: training has begun, or the state is of another strategy or other groups.
        """
        if self._lazy_start.past:
            raise RequestError("training has begun: load the optimizer's state right after group.distribute")
        if state_dict.get("strategy") != self._strategy:
            given = state_dict.get("strategy", "a plain optimizer")
            raise RequestError(
                f"the state is of {given}, not of {self._strategy}: join with the same strategy"
            )
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise RequestError(
                f"the state has {len(groups)} param groups, the optimizer {len(self.param_groups)}: make it as it was"
            )
        if self._servers is not None and state_dict.get("servers"):
            self._servers.give(state_dict["servers"])
        if state_dict["tensors"] or state_dict["facts"]:
            self._replica.part.load_state((state_dict["tensors"], state_dict["facts"]))
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update(options)
        self._lazy_start.step = self.steps = state_dict["steps"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the parameters have been shared out.

        Raises:
            RequestError: always, once the optimiser has been made.
        """
        if self._closed:
            raise RequestError(
                "param groups cannot be added to a distributed optimizer: add them before distribute"
            )
        super().add_param_group(param_group)

    def _learning_rate(self) -> float:
        """Gives that of the group which leads, to which the strategy keeps the others' ratio."""
        lead = float(self.param_groups[self._lead]["lr"])
        for number, (group, options) in enumerate(zip(self.param_groups, self._options, strict=True)):
            for key, value in options.items():
                if group[key] != value:
                    raise RequestError(
                        f"{key} of param group {number} changed from {value} to {group[key]}: during training only "
                        "the learning rate may (OneCycleLR and CyclicLR: pass cycle_momentum=False)"
                    )
            self._check_ratio(number, float(group["lr"]), lead)
        return lead

    def _check_ratio(self, number: int, rate: float, lead: float) -> None:
        base, other = self._rates[self._lead], self._rates[number]
        if rate != lead if base == other else not isclose(rate * base, lead * other, rel_tol=1e-6):
            raise RequestError(
                f"param groups {self._lead} and {number} began with learning rates {base:g} and {other:g} and are "
                f"now at {lead:g} and {rate:g}: let their ratio be as it was"
            )


def _first_in_vector(groups: list[dict[str, Any]], replica: FlatReplica) -> int:
    """Gives the group of the first trained number: its learning rate is what an optimiser on the vector is told."""
    starts = {view.parameter: view.start for view in replica.flat.views}
    return min(range(len(groups)), key=lambda number: min(starts[each] for each in groups[number]["params"]))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
