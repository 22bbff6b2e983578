"""The optimizer that a user's loop calls: it exchanges the gradients, and the strategy does the rest.

Lazy start: a replica starts at its model's first use in training. Replicas become equal when they start, and
servers get their parameters then. So the start is as late as possible, and weights and states that are
loaded after `distribute` still count.

Step retry: a step is repeated with a copy of its gradients when another worker fails in the middle of it.

    backward ─▶ kept: a copy ─▶ exchange ✝ ─▶ regroup ─▶ kept ─▶ exchange, with the remaining workers

A user's loop cannot compute the gradients again, and a failed exchange may have changed some
of them.

Saved states: the coordinator requests the servers' side of a saved optimizer, and sends it back when a state
is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import isclose
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from polyrhythm.api.loop.gradients import Gradients, Mean, line_of_script
from polyrhythm.api.loop.shard import StepWeight
from polyrhythm.api.loop.store_board import Ends
from polyrhythm.communication.log import Result
from polyrhythm.communication.message import pack_tensors, unpack_tensors
from polyrhythm.errors import OutOfStep, RequestError, RunError
from polyrhythm.roles.control_messages import ShardState
from polyrhythm.roles.replica import FlatReplica, Replica
from polyrhythm.roles.trainer import LoopSteps
from polyrhythm.roles.world import World
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.state import State
from polyrhythm.strategies.worker_part import PLACES, Logged, OptimizerSource, Step, Writes
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class PlacedParameters:
    """Places of the distributed parameters in the model, with their dtypes and device.

    Args:
        model: distributed model; its parameters are those of the vector.
        flat: flat parameters.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._flat = flat
        self._placed = []
        for view in flat.views:
            module, _, name = view.name.rpartition(".")
            self._placed.append((view, modules[module]._parameters, name, view.parameter.dtype))

    def check(self) -> None:
        """Refuse parameters that training would miss from here on, or would round differently.

        Raises:
            RequestError: a parameter has changed its dtype or device since `distribute`, or was replaced in the model.
        """
        device = self._flat.vector.device
        for view, held, name, dtype in self._placed:
            parameter = view.parameter
            if held.get(name, parameter) is not parameter:  # a parametrization changes its name
                raise RequestError(
                    f"{view.name} was replaced by another parameter after group.distribute, which would not be "
                    "trained: replace and move parameters before, and load weights without assign=True"
                )
            if parameter.dtype is not dtype or parameter.device != device:
                before, now = (
                    (dtype, parameter.dtype) if parameter.dtype is not dtype else (device, parameter.device)
                )
                raise RequestError(
                    f"{view.name} went from {before} to {now} after group.distribute: convert and move the model "
                    "before, or a copy of it"
                )


class LazyStart:
    """Starts a replica once, at its model's first use in training.

    Args:
        replica: replica to start; those of all workers must start at the same place of their programs.
        begin: function that starts it with the others, at a step; returns the step at which it has started.

    Attributes:
        step: step at which the replica starts, then at which it has started.
        past: whether it has started.
        placed: parameters of the model.
    """

    def __init__(self, replica: Replica, begin: Callable[[int], int]) -> None:
        self.step = 0
        self.past = False
        self.placed = PlacedParameters(replica.model, replica.flat)
        self._flat = replica.flat
        self._begin = begin
        used = [module for module in replica.model.modules() if list(module.parameters(recurse=False))]

        def on_use(module: nn.Module, inputs: object) -> None:
            # A function: of a bound method, a copy of the model would copy the whole replica.
            if module.training:
                self.in_training()

        self._hooks = [module.register_forward_pre_hook(on_use) for module in used]

    def now(self) -> bool:
        """Start the replica, unless it has started; return whether it has done so now."""
        if self.past:
            return False
        self.past = True
        for hook in self._hooks:
            hook.remove()
        self.placed.check()
        self._flat.gather_parameters()  # weights may have been loaded since
        self._flat.gather_gradients()  # `model.to(memory_format=…)` moves them as well
        self.step = self._begin(self.step)
        self._flat.spread_parameters()
        return True

    def in_training(self) -> None:
        """Start the replica if this is no evaluation, which a single worker may do on its own."""
        if torch.is_grad_enabled():
            self.now()


class ServerStates:
    """Access of the coordinator to the servers' states.

    Args:
        world: context of the coordinator.
        faults: fault policy, by which shards belong to servers.
        ask: function that requests the state of every shard.
    """

    def __init__(self, world: World, faults: FaultPolicy, ask: Callable[[], list[State]]) -> None:
        self._world = world
        self._faults = faults
        self._ask = ask

    def ask(self) -> list[dict[str, Any]]:
        """Request the state of every shard: tensors by name, and facts."""
        return [{"tensors": tensors, "facts": facts} for tensors, facts in self._ask()]

    def give(self, states: list[dict[str, Any]]) -> None:
        """Send every server the states of its shards; before training begins."""
        for server, rank in enumerate(self._world.roles.servers):
            for shard in self._faults.shards_of(server):
                state = ShardState(shard, states[shard]["tensors"], states[shard]["facts"])
                self._world.network.send(rank, state.message())


class DistributedOptimizer(torch.optim.Optimizer):
    """Replaces a user's optimizer, which the strategy runs on workers or servers.

    It has the same `param_groups`, so schedulers of the one and of the other change both. Where every worker holds the
    mean of all gradients, the user's own object makes the steps. Elsewhere only learning rates may change during
    training, and those of several groups must keep their ratio. After a step all gradients are zero.

    Args:
        optimizer: optimizer of the user.
        steps: object that takes the steps of the replica.
        lazy_start: start of the replica.
        weight: weights of the steps.
        mean: time at which a worker holds the mean of all gradients.
        strategy: spec of the strategy, for saved states.
        servers: servers' side of saved states, on the coordinator.
        identical: whether all workers hold the same parameters after every step.
        meets: whether workers are synchronous, each with its own gradient: a step that a `GradScaler` would
            leave out is then a step without a gradient, since the others wait for it.
        all_take_part: whether every exchange needs all workers.

    Attributes:
        exchange_begins: called before gradients are exchanged.
        where_all_are: returns a description of all workers' places when they differ, given this worker's.
        waiting: entered while this worker waits for others, with its place where these need it.
        over: whether the run has ended.
        gradients: gradients of the current step.
        uneven: whether workers may be at different places of their loops.
        was_uneven: whether they have been at different places before.
        steps: steps done by this worker.
        has_grown: whether parameters have been added that had no place in the vector.
        on_growth: called when such parameters are added.
        gather: returns the values of all workers, in their order.
        found_inf: set by a `GradScaler` for a step that it leaves to this object: whether a gradient is not finite.
        grad_scale: set by a `GradScaler` as well: scale of the gradients; 1 where the loop has unscaled them.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | float = 1.0
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: LoopSteps,
        lazy_start: LazyStart,
        weight: StepWeight,
        mean: Mean,
        strategy: str,
        servers: ServerStates | None = None,
        *,
        identical: bool = True,
        meets: bool = False,
        all_take_part: bool = False,
    ) -> None:
        self._closed = False
        self._all_take_part = all_take_part
        self._step_supports_amp_scaling = meets  # torch's scalers look for this name
        self._inner = optimizer
        self._identical = identical
        self._stepped: Tensor | None = None
        self._asked_weight = 0.0
        self.exchange_begins: Callable[[], None] = lambda: None
        self.where_all_are: Callable[[str], str] = lambda own: own
        self.waiting: Callable[[tuple[int, int] | None], AbstractContextManager[None]] = _unnoticed
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the list itself, not only its groups
        self._closed = True
        self._lazy_start = lazy_start
        self.over = False
        self.steps = 0
        self._continues_with = 0
        self._epoch_began_at = 0
        self._steps = steps
        replica = steps.trainer.replica
        assert isinstance(replica, Replica), "a loop of a user's own trains a model"
        self._replica = replica
        self._weight = weight
        self.gradients = Gradients(self._replica.flat, mean, self.mean_gradients)
        self._has_stepped = self._was_averaged = self._several = False
        self._exchanges = 0
        self.uneven = self.was_uneven = False
        self._reported = False
        self.has_grown = self._has_added = False
        self.on_growth: Callable[[], None] = lambda: None
        self.gather: Callable[[Any], list[Any]] = lambda own: [own]
        self._strategy = strategy
        self._servers = servers
        self._begin_groups()
        follows = self._replica.part.follows
        if follows is OptimizerSource.NOTHING and self._rates[self._lead] == 0 and any(self._rates):
            raise RequestError(
                f"param group {self._lead} has learning rate 0 and another has not, so their ratio is unknown: make "
                "the scheduler after group.distribute"
            )
        # A scheduler of the user's own optimizer watches whether that one steps, and would warn that it does not.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange the gradients and update the parameters, as the strategy does.

        If the others have not waited for this worker (`backup_workers`), its steps have no effect until it has caught
        up: they change nothing, so that all loops have the same number of steps.

        Args:
            closure: function that computes the loss and its gradients; called once, first, or as often as the optimizer
            requires (LBFGS).

        Returns:
            The result of the closure.

        Raises:
            RequestError: an option other than the learning rate has changed, or a ratio of learning rates; or the run
                is over.
            RunError: a rank has failed.
        """
        if self.over:
            raise RequestError("the run is over: call optimizer.step inside the `with` of polyrhythm.join")
        loss = None
        own = self._replica.plan.own if self.gradients.mean is Mean.STEP else None
        if closure is not None and own is not None and own.asks_for_closure:
            self.start()
            own.closure = closure  # its backward passes average
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        if own is not None:
            if own.closure is None and not self.gradients.averaged:
                self._average()
            self._steps.update(self.steps, self._rates[self._lead])
            self._publish_parameters()
            if own.closure is not None:
                loss, own.closure = own.loss, None
            self.gradients.zero(to_none=True)
        else:
            self._exchange()
        self.steps += 1
        return loss

    def mean_gradients(self) -> None:
        """Overwrite the gradients with the workers' mean, where all have the same parameters at every step."""
        if self.gradients.averaged:
            return
        if self.gradients.mean is Mean.STEP:
            self._average()
        elif self.gradients.mean is Mean.ASKED:
            self._asked_weight = self._next_weight()
            self.gradients.mean_of(self._steps, self._asked_weight)

    def _average(self) -> None:
        self._lazy_start.placed.check()
        self.gradients.note_missing()
        weight = self._next_weight()
        if weight == 0:
            self._replica.flat.gather_gradients()
            self._replica.flat.zero_gradients()
        self._steps_average(weight, self._place())
        self.gradients.averaged = True
        self._replica.flat.spread_gradients()
        for position in self._replica.flat.without_gradient:
            self._replica.flat.views[position].parameter.grad = None

    def finish(self) -> None:
        """Agree with the others that no step remains, where every worker holds the mean of all gradients.

        Servers that hold the parameters receive the changes that the loop made to them after its last step.

        Raises:
            OutOfStep: another worker takes more steps.
        """
        self._lazy_start.placed.check()
        self._replica.flat.gather_parameters()
        if self.gradients.mean is Mean.STEP and not self._steps.trainer.over:
            self.gradients.zero(to_none=True)
            self._steps_average(0.0, PLACES)
        elif self._stepped is not None:
            self._replica.flat.change = self._change()
            if self._replica.flat.change is not None:
                self.gradients.zero(to_none=True)
                self._steps.take(Step(self.steps, 0.0), self._lead_rate)

    def begin_uneven(self) -> None:
        """Begin a loop that may end sooner on some workers than on others; `take_part_until` ends it."""
        self.start()
        self.uneven = self.was_uneven = True
        self._steps.trainer.digests = None  # workers with finished loops make no updates
        self._exchanges = self.steps  # the same on all, replacements among them

    def take_part_until(self, ends: Ends, loop: str, together: int) -> None:
        """Take part in the others' exchanges without a gradient, until the loops of all have ended.

        Every worker then continues from the state of one that has taken most steps. Failed workers are not awaited.

        Args:
            ends: shared record of the loops' ends.
            loop: name of the loop, the same on all workers.
            together: number of steps from one exchange to the next.

        Raises:
            RequestError: the optimizer requires a closure, which cannot be evaluated here.
        """
        own = self._replica.plan.own
        if own is not None and own.asks_for_closure:
            raise RequestError("group.join does not support an optimizer with a closure")
        steps = self.steps
        ends.print_line(loop)
        while (last := ends.last(loop, self._exchanges, together)) is None or self._exchanges < last:
            self._exchange_nothing()
        self.gradients.zero(to_none=True)
        if self.gradients.mean is Mean.STEP:
            self._continue_from_one(steps)

    def _exchange_nothing(self) -> None:
        """Take part in one exchange without a gradient."""
        self.start()
        self.gradients.zero(to_none=True)
        if self.gradients.mean is Mean.STEP:
            self.gradients.note_missing()
            self._steps_average(0.0, 0)
            # Its result is overwritten in the end; so this worker is at the others' step if one fails.
            self._steps.update(self.steps, self._lead_rate)
            self.steps += 1
            return
        if self._was_averaged:
            self.gradients.mean_of(self._steps, 0.0)
        self._replica.flat.change = self._change()
        self._steps.take(Step(self.steps, 0.0), self._lead_rate)
        self._publish_parameters()
        self.steps += 1
        self._exchanges += 1

    def _continue_from_one(self, taken: int) -> None:
        """Continue from the state of the first worker that has taken most steps itself; all call it.

        Args:
            taken: steps of this worker with gradients of its own, and all before its loop.
        """
        trainer, replica = self._steps.trainer, self._replica
        logged, view = replica.part_as(Logged), trainer.members
        exchanger, everyone = logged.exchanger, replica.workers.size

        own = torch.zeros(2, everyone, dtype=torch.float64)
        own[:, trainer.worker] = torch.tensor([taken, self.steps])
        counts = exchanger.sum(own.flatten()).view(2, everyone)

        def pass_on(_: object, number: int) -> Result:
            members = exchanger.members
            there = [float(counts[0, member]) for member in members]
            if min(there) == max(there):
                return Result(None, 1.0, False)
            root = there.index(max(there))
            state = torch.empty(0, dtype=torch.uint8)
            if trainer.worker == members[root]:
                tensors, facts = replica.part.state()
                state = pack_tensors({**tensors, _VECTOR: replica.flat.vector}, facts)
            size = torch.tensor([len(state)])
            exchanger.workers.broadcast(size, root)
            state = state if len(state) else torch.empty(int(size), dtype=torch.uint8)
            exchanger.workers.broadcast(state, root)
            return Result(state, 1.0, False)

        state = exchanger.exchange(pass_on, aside=1).vector
        if state is not None:
            tensors, facts = unpack_tensors(state)
            replica.flat.vector.copy_(tensors.pop(_VECTOR))
            replica.part.load_state((tensors, facts))
            replica.flat.spread_parameters()
        self.steps = trainer.step = int(counts[1].max())
        self._check_view(view)

    def _steps_average(self, weight: float, place: int) -> None:
        self.exchange_begins()
        self._exchanges += 1
        view = self._steps.trainer.members if self.uneven else None
        if self.uneven and self._replica.part.averaged:
            self._several = True
        try:
            with self.waiting(self.place):
                self._steps.average(Step(self.steps, weight), place)
        except OutOfStep:
            raise OutOfStep(self.where_all_are(self._where(place))) from None
        if self.uneven:
            self._check_view(view)

    @property
    def place(self) -> tuple[int, int] | None:
        """Steps done, and means of the current step; None where not all take part in each exchange."""
        if not self._all_take_part or self.uneven:
            return None
        return self.steps, self._replica.part.averaged

    def _check_view(self, view: tuple[int, ...] | None) -> None:
        """Check a view after an exchange that began in it, where loops may be of unequal length.

        Raises:
            RunError: a worker has failed, and workers with finished loops had counted passes of others as steps.
        """
        if self._several and self._steps.trainer.members != view:
            raise RunError(
                "a worker was lost in group.join, where the loop takes several backward passes a step: such a loop can "
                "only continue from a saved state (group.load)"
            )

    def _place(self) -> int:
        """Return a number for the current batch, which differs from those of the batches around it."""
        if self.uneven:
            return 0
        shard, epoch, batch = self._weight.batch or (0, 0, 0)
        return (13 * shard + 7 * epoch + batch + self._digest()) % (PLACES - 2)

    def _digest(self) -> int:
        """Return a number of the options of all groups; it is varied from time to time, so that differences are found.

        A place is a small number, which may be the same for other options.
        """
        if self._replica.workers.size == 1:
            return 0
        options = [_comparable(value) for group in self.param_groups for value in group.values()]
        return crc32(repr(options).encode(), self.steps // _DIGEST_STEPS)

    def _where(self, place: int) -> str:
        if place == PLACES:
            return f"has left the loop after {self.steps} steps"
        line = line_of_script(sys._getframe())
        changed = {
            key: _comparable(value)
            for group, before in zip(self.param_groups, self._options, strict=True)
            for key, value in group.items()
            if key in before and before[key] != value
        }
        rates = ", ".join(f"{float(group['lr']):g}" for group in self.param_groups)
        options = f", learning rate {rates}" + "".join(f", {key} {value}" for key, value in changed.items())
        if self._weight.batch is None:
            return f"is at step {self.steps}{line}{options}"
        _, epoch, batch = self._weight.batch
        return f"is at step {self.steps} with batch {batch} of epoch {epoch}{line}{options}"

    def _exchange(self) -> None:
        """Take a step of a strategy with workers that do not hold the mean of all gradients by themselves."""
        self._lazy_start.placed.check()
        self._replica.flat.gather_parameters()  # the strategy updates their vector
        if self.found_inf is not None and bool(self.found_inf):
            self.zero_grad()
        elif isinstance(self.grad_scale, Tensor):
            self._replica.flat.gather_gradients()
            self._replica.flat.gradients.div_(self.grad_scale.to(self._replica.flat.gradients))
            self._replica.flat.spread_gradients()
        rate, plan = self._terms()
        if not self.gradients.averaged and self.gradients.changed_by_loop():
            self._report_gradients()
        if not self._has_stepped and self.gradients.averages:
            changed = self._replica.flat.vector.new_tensor([float(self.gradients.changed_by_loop())])
            self._steps.sum(changed)  # all decide alike
            self.gradients.averages = bool(changed)
        self._has_stepped = True
        self._was_averaged = self.gradients.averaged
        weight = self._asked_weight if self.gradients.averaged else self._next_weight()
        left_out = self.steps < self._continues_with
        if weight == 0 or left_out:
            self.zero_grad()
        self.gradients.keep_left()
        if not left_out:
            self._replica.flat.change = self._change()
            with self.waiting(self.place):
                self._steps.take(Step(self.steps, weight, plan=plan), rate)
            self._continues_with = self._replica.part.next_step(self.steps)
        self.gradients.zero(to_none=True)
        self._exchanges += 1
        self._publish_parameters()

    def _publish_parameters(self) -> None:
        self._replica.flat.spread_parameters()
        if self._stepped is not None:
            self._stepped.copy_(self._replica.flat.vector)

    def _next_weight(self) -> float:
        weight = self._weight.take()
        if self.start() and self._replica.workers.rank > 0:
            return 0.0  # this gradient was computed before this worker had worker 0's parameters
        return weight

    def _report_gradients(self) -> None:
        if self._reported or self._replica.workers.size == 1 or self._replica.workers.rank > 0:
            return
        self._reported = True
        print(
            f"polyrhythm: {gradients_text(self._strategy, self.gradients.mean)}", file=sys.stderr, flush=True
        )

    def settle(self) -> None:
        """Finish pending updates, so that the parameters hold all steps so far.

        A forward pass and `state_dict` do so by themselves. It is for programs that read parameters directly, with a
        strategy that updates them only just before their use.
        """
        self._between_steps(lambda: self._steps.guard(self._replica.settle))

    def start(self) -> bool:
        """Start the replica if it has not started; return whether it has done so now."""
        if not self._lazy_start.now():
            return False
        self.steps = self._epoch_began_at = self._lazy_start.step
        return True

    def begin_epoch(self) -> None:
        """Start the replica, or catch up with the others' steps during the user's evaluation."""
        if self.start() or self.steps == self._epoch_began_at:
            return
        self.settle()
        self._between_steps(lambda: self._steps.guard(self._replica.part.catch_up))
        self._epoch_began_at = self.steps

    def regroup(self) -> None:
        """Regroup with the present workers; see `LoopSteps.regroup`."""
        self._between_steps(self._steps.regroup)

    def _between_steps(self, act: Callable[[], None]) -> None:
        """Have the strategy change the parameters; changes by the loop are kept, and sent with the next step."""
        flat = self._replica.flat
        flat.gather_parameters()
        change = self._change() if self._stepped is not None else None
        written = None if change is None else flat.vector.clone()
        if change is not None and self._stepped is not None:
            flat.vector.copy_(self._stepped)
        act()
        self._publish_parameters()
        if change is not None and written is not None:
            if self._replica.part.write_treatment is Writes.ADDED:
                flat.vector.add_(change)
            else:
                flat.vector.copy_(written)
            flat.spread_parameters()

    def continue_at(self, step: int) -> None:
        """Continue at the others' step, whatever this worker, a replacement, received at its start."""
        self.steps = self._lazy_start.step = self._epoch_began_at = step
        self._steps.trainer.step = step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero in place, and to None for the optimizer if `set_to_none`."""
        self.gradients.zero(to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state: the options of all groups, and the state of its strategy.

        During a run, the coordinator's state contains the servers' as well (parameters, optimizers, clocks).

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
        """Load the result of `state_dict`; on every worker, before its first step.

        With the coordinator's, servers continue from their states: then their parameters count, not those of worker 0.

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
        self._load_groups(groups)
        self._lazy_start.step = self.steps = state_dict["steps"]

    def _load_groups(self, groups: list[dict[str, Any]]) -> None:
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update(
                {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
            )

    def settings(self) -> dict[str, Any]:
        """Return the state of this object in a run's state, without that of the strategy's part."""
        return {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            "has_stepped": self._has_stepped,
            "averages": self.gradients.averages,
        }

    def begin_with(self, settings: dict[str, Any], step: int, servers: list[State]) -> None:
        """Continue from another run, after loading the state of the strategy's part; all workers call it.

        Args:
            settings: result of `settings` in that run.
            step: steps done by this worker.
            servers: state of every shard, on the coordinator.
        """
        if self._servers is not None and servers:
            self._servers.give([{"tensors": tensors, "facts": facts} for tensors, facts in servers])
        self._load_groups(settings["param_groups"])
        self._has_stepped, self.gradients.averages = settings["has_stepped"], settings["averages"]
        self._lazy_start.step = self.steps = step
        self.start()

    @property
    def has_begun(self) -> bool:
        """Whether training has begun."""
        return self._lazy_start.past

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that are trained from now on; all workers call it at the same place.

        Args:
            param_group: see the optimizer's own method.

        Raises:
            RequestError: the strategy cannot train parameters added later; or a step is unfinished, or the
                parameters are not the model's, or other workers add others.
        """
        if not self._closed:
            super().add_param_group(param_group)
            return
        names = {id(parameter): name for name, parameter in self._replica.model.named_parameters()}
        given = param_group["params"]
        added = [given] if isinstance(given, Tensor) else list(given)
        if any(id(each) not in names for each in added):
            raise RequestError("add_param_group: a parameter is not one of the distributed model")
        if self.gradients.pending:
            raise RequestError(
                "add_param_group: gradients of a step are there: call it after optimizer.step()"
            )
        part, flat = self._replica.part, self._replica.flat
        placed = {id(view.parameter) for view in flat.views}
        grows = any(id(each) not in placed for each in added)
        if (grows and not (self.gradients.mean is Mean.STEP and part.replicated)) or (
            part.follows is OptimizerSource.NOTHING
        ):
            raise RequestError(
                f"add_param_group: {self._strategy} trains what the optimizer had at group.distribute: give it these "
                "parameters before, frozen by requires_grad_(False), and thaw them here; or use synchronous"
            )
        self.start()
        own = [[names[id(each)], *each.shape] for each in added]
        if any(each != own for each in self.gather(own)):
            raise RequestError("add_param_group: workers add different parameters: give all the same")
        self._inner.add_param_group({**param_group, "params": added})
        if grows:
            optimized = [each for group in self.param_groups for each in group["params"]]
            flat.gather_parameters()
            flat.grow(self._replica.model, optimized)
            self._steps.share_again(f"group {len(self.param_groups)}")
            flat.spread_parameters()
            self._lazy_start.placed = PlacedParameters(self._replica.model, flat)
            self.has_grown = True
            self.on_growth()
        self._has_added = True
        self._begin_groups()

    def _begin_groups(self) -> None:
        """Record the options of all groups, and their parameters, as the reference for later changes."""
        before = self.gradients
        self.gradients = before.of(each for group in self.param_groups for each in group["params"])
        self._trained = [view.parameter.requires_grad for view in self._replica.flat.views]
        self._options = [_options(group) for group in self.param_groups]
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._lead = _first_in_vector(self.param_groups, self._replica)

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the user's optimizer alone, such as `train` and `eval`, or `first_step`."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def second_step(self, *arguments: Any, **options: Any) -> None:
        """Take the second step of a sharpness-aware optimizer; `first_step` is its own."""
        own = self._replica.plan.own
        if own is None or not hasattr(self._inner, "second_step"):
            raise AttributeError(f"{type(self._inner).__name__!r} object has no attribute 'second_step'")
        own.step_of_inner = lambda: self._inner.second_step(*arguments, **options)
        try:
            self.step()
        finally:
            own.step_of_inner = None

    def _terms(self) -> tuple[float, OptimizerPlan | None]:
        """Return the learning rate of the current step, and the optimizer's plan where that has changed.

        Raises:
            RequestError: the optimizer has changed, and steps of this strategy do not carry such changes.
        """
        follows, flat = self._replica.part.follows, self._replica.flat
        lead = self._lead_rate
        if follows is not OptimizerSource.NOTHING:
            self.gradients.note_missing()
        if follows is OptimizerSource.OBJECT:
            return lead, None
        if follows is OptimizerSource.PLAN and (flat.without_gradient or self._has_changed()):
            plan = OptimizerPlan.of_step(self._inner, flat)
            return plan.rate, plan
        self._check_frozen()
        return self._learning_rate(), None

    @property
    def _lead_rate(self) -> float:
        return float(self.param_groups[self._lead]["lr"])

    def _has_changed(self) -> bool:
        """Whether the optimizer has changed since the start, except for a common factor of all learning rates."""
        if self._has_added:
            return True
        if any(
            view.parameter.requires_grad != trained
            for view, trained in zip(self._replica.flat.views, self._trained, strict=True)
        ):
            return True
        if any(
            group[key] != value
            for group, options in zip(self.param_groups, self._options, strict=True)
            for key, value in options.items()
        ):
            return True
        base, lead = self._rates[self._lead], float(self.param_groups[self._lead]["lr"])
        return any(
            float(group["lr"]) * base != lead * rate
            for group, rate in zip(self.param_groups, self._rates, strict=True)
        )

    def _change(self) -> Tensor | None:
        """Return the loop's change of the parameters since the last step, `(size,)`; None if there is none.

        Raises:
            RequestError: the strategy would overwrite the change.
        """
        flat, part = self._replica.flat, self._replica.part
        if part.write_treatment is Writes.KEPT:
            return None
        flat.gather_parameters()
        if self._stepped is None:
            self._stepped = flat.vector.clone()
            return None
        change = None if torch.equal(self._stepped, flat.vector) else flat.vector - self._stepped
        fits = part.write_treatment is Writes.ADDED or (
            part.write_treatment is Writes.IN_STEP and self._identical
        )
        if change is not None and not fits:
            raise RequestError(
                f"parameters were changed after optimizer.step(), which {self._strategy} would overwrite: change them "
                "with a strategy that keeps one model, such as synchronous, or one per worker, such as local_sgd"
            )
        return change

    def _learning_rate(self) -> float:
        """Return the learning rate of the lead group, to which the strategy keeps the others' ratio."""
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

    def _check_frozen(self) -> None:
        for view, trained in zip(self._replica.flat.views, self._trained, strict=True):
            if view.parameter.requires_grad != trained:
                raise RequestError(
                    f"{view.name} was {'frozen' if trained else 'thawed'} after group.distribute, which "
                    f"{self._strategy} cannot follow: do so before, or use synchronous"
                )

    def _check_ratio(self, number: int, rate: float, lead: float) -> None:
        base, other = self._rates[self._lead], self._rates[number]
        if rate != lead if base == other else not isclose(rate * base, lead * other, rel_tol=1e-6):
            raise RequestError(
                f"param groups {self._lead} and {number} began with learning rates {base:g} and {other:g} and are "
                f"now at {lead:g} and {rate:g}: let their ratio be as it was"
            )


def gradients_text(strategy: str, mean: Mean) -> str:
    """Return a line that explains to which gradients clipping applies, where that is not the workers' mean."""
    if mean is Mean.ASKED:
        return (
            f"gradients were changed after backward(); with {strategy} they are each worker's own there, not the mean "
            "of all: use group.clip_grad_norm_ or group.clip_grad_value_, or call group.mean_gradients() before"
        )
    return (
        f"gradients were changed after backward(); with {strategy} they are each worker's own, so that clipping "
        "applies to each worker's gradient, and never to the mean of all"
    )


def _unnoticed(place: tuple[int, int] | None) -> AbstractContextManager[None]:
    return nullcontext()


_DIGEST_STEPS = 16
_VECTOR = "vector."
_PLAIN = (bool, int, float, str, type(None))


def _comparable(option: Any) -> Any:
    """Return an option in a form that is the same on all workers; None where it has none, such as parameters."""
    if isinstance(option, tuple | list) and not any(isinstance(each, nn.Parameter) for each in option):
        return [_comparable(each) for each in option]
    if isinstance(option, Tensor):
        return option.item() if option.numel() == 1 else None
    return option if isinstance(option, _PLAIN) else None


def _first_in_vector(groups: list[dict[str, Any]], replica: FlatReplica) -> int:
    """Return the group of the first trained number: an optimizer on the vector uses its learning rate."""
    starts = {view.parameter: view.start for view in replica.flat.views if view.parameter.requires_grad}
    first = [
        min((starts[each] for each in group["params"] if each in starts), default=replica.flat.size)
        for group in groups
    ]
    return first.index(min(first))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
