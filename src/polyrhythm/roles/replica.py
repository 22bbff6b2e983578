"""A replica: a model, its flat parameters, and the worker part of a strategy, tied together by hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


class Replica:
    """One worker's copy of the model, and its way to the others.

    Args:
        model: changed in place: its parameters become views of one vector.
        optimizer: over the model's parameters; read once, for its class and options.
        strategy: makes the worker part.
        world: where this rank is.
        announce: whether buckets are announced during the backward pass. Off where a step may hold several
            backward passes.
        steps: that every worker takes in the whole run; None where nobody can tell.

    Attributes:
        flat: the parameters and gradients.
        plan: of the optimiser.
        part: the strategy's side of this worker.
        bytes_sent: by the strategy in its steps, since the replica was made.
        run_hook: runs what a hook of the model has to do; replaced by an owner that recovers when it raises `PeerLost`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        world: World,
        *,
        announce: bool,
        steps: int | None = None,
    ) -> None:
        self.model = model
        self.workers: Communicator = world.workers()
        asked = strategy.bucket_bytes_for(self.workers, next(model.parameters()))
        self.flat = FlatParameters(model) if asked is None else FlatParameters(model, asked)
        self.plan = OptimizerPlan.of(optimizer, self.flat)
        setting = WorkerSetting(
            world.network,
            self.workers,
            world.cast,
            self.flat,
            self.plan,
            steps,
            succeeds=world.rejoins,
            incarnation=world.incarnation,
            leader_returns=world.leader_returns,
        )
        self.part = strategy.worker(setting)
        self.bytes_sent = 0
        self.run_hook: Callable[[Callable[[], object]], object] = lambda act: act()
        self._network = world.network
        self._sent_before = 0
        self._step = Step(0)
        self._announces = announce and self.part.uses_bucket_ready and self.workers.size > 1
        self._parameters = [len(bucket.parameters) for bucket in self.flat.buckets]
        self._missing: list[int] = []
        self._next_bucket = 0
        if self._announces and world.pace.live:
            self._hook_gradients()
        if self.part.uses_before_use and world.pace.live:
            self._hook_uses()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name (batch-norm statistics): each worker's own, never averaged in training."""
        return dict(self.model.named_buffers())

    def pass_shares(self, shares: tuple[float, ...]) -> tuple[float, ...]:
        """Gives the pieces in which a drawn pass is played: a bucket each, or none if nobody listens."""
        return shares if self._announces or self.part.uses_before_use else ()

    @property
    def untrained(self) -> dict[str, Tensor]:
        """What no optimiser changes, by name: buffers, and parameters that are frozen."""
        frozen = {
            name: parameter.data
            for name, parameter in self.model.named_parameters()
            if not parameter.requires_grad
        }
        return self.buffers | frozen

    def share_untrained(self) -> None:
        """Makes what is not trained equal to worker 0's; before a checkpoint gives every worker its own buffers."""
        for value in self.untrained.values():
            self.workers.broadcast(value)

    def begin(self, step: Step) -> None:
        """Begins a step: gradients are zero, and no bucket is ready."""
        self._sent_before = (
            self._network.traffic.bytes_sent
        )  # a task in the background sends at any time of the step
        self._step = step
        self._missing = self._parameters.copy()
        self._next_bucket = 0
        self.part.begin(step)

    def announce(self, bucket: int) -> None:
        """Tells the strategy that a bucket is ready; used where no hooks are."""
        if self._announces:
            self.part.bucket_ready(bucket)

    def use(self, bucket: int) -> None:
        """Tells the strategy that a bucket's parameters are about to be used; called where no hooks are."""
        if self.part.uses_before_use:
            self.part.before_use(bucket)

    def finish(self, learning_rate: float, *, weightless: bool = False) -> bool:
        """Ends a step: exchanges and updates, and zeroes the gradients.

        Args:
            learning_rate: to update with.
            weightless: the gradients turned out to be useless; only where no bucket has been announced.

        Returns:
            Whether to stop.
        """
        if weightless:
            self._step = replace(self._step, weight=0.0)
        self.flat.gather_gradients()
        stop = self.part.gradients_ready(self._step, learning_rate)
        self.flat.zero_gradients()
        self.bytes_sent += self._network.traffic.bytes_sent - self._sent_before
        return stop

    def settle(self) -> None:
        """Finishes what is under way; what that sends belongs to the steps."""
        sent_before = self._network.traffic.bytes_sent
        self.part.settle()
        self.bytes_sent += self._network.traffic.bytes_sent - sent_before

    def _hook_gradients(self) -> None:
        for number, bucket in enumerate(self.flat.buckets[:-1]):  # with the last, the pass is over
            for position in bucket.parameters:
                parameter = self.flat.views[position].parameter

                def ready(_: Tensor, number: int = number) -> None:
                    self._count_down(number)

                parameter.register_post_accumulate_grad_hook(ready)

    def _count_down(self, bucket: int) -> None:
        """Announces buckets in their order, whatever the order in which autograd fills them; the last goes without."""
        self._missing[bucket] -= 1
        while self._next_bucket < len(self._missing) and self._missing[self._next_bucket] == 0:
            self.announce(self._next_bucket)
            self._next_bucket += 1

    def _hook_uses(self) -> None:
        bucket_of = {
            self.flat.views[position].parameter: number
            for number, bucket in enumerate(self.flat.buckets)
            for position in bucket.parameters
        }
        for module in self.model.modules():
            if next(module.parameters(recurse=False), None) is None:
                continue
            # With all below it: attention, for one, uses its projection's weights without calling the projection.
            used = sorted({bucket_of[inner] for inner in module.parameters() if inner in bucket_of})

            def before(_module: nn.Module, _inputs: object, used: list[int] = used) -> None:
                for bucket in used:
                    self.run_hook(partial(self.part.before_use, bucket))

            module.register_forward_pre_hook(before)
        self.model.register_state_dict_pre_hook(lambda *_: self.run_hook(self.settle))
