"""A replica: one worker's flat parameters and its side of the strategy, for a model tied to them by hooks.

`FlatReplica` is the part that every loop steps. It needs no network, so a dry run uses it unchanged.
`Replica` adds a model with hooks, which announce each use and each gradient to the strategy during a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.data.loader import ImageWaits
from polyrhythm.errors import RequestError
from polyrhythm.roles.world import World
from polyrhythm.strategies.compressing import compressor_of
from polyrhythm.strategies.divided_network import ComputesStages, HasStages
from polyrhythm.strategies.strategy import SizesBuckets, Strategy
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

if TYPE_CHECKING:
    from polyrhythm.partition.outlook import PipelineForecast

Kind = TypeVar("Kind", bound=WorkerPart)


class FlatReplica:
    """One worker's flat parameters, and the worker part of a strategy that trains them.

    Args:
        strategy: strategy, which makes the worker part.
        world: context of the rank.
        setting: setting of the worker part.
        announce: whether buckets may be announced during the backward pass.

    Attributes:
        flat: flat parameters and gradients.
        plan: description of the optimizer.
        part: worker part of the strategy.
        workers: communicator of all workers.
        announces: whether buckets are announced during the backward pass.
        defers: whether announcements are suppressed in the current step.
        note_mean: callback in the exchange of the current step, called while the flat gradients hold the
            workers' mean (see `WorkerPart.average`); None: no callback.
        bytes_sent: bytes that the strategy has sent in steps of this replica.
        bytes_inside: those of them that went to ranks of the same host, as `Traffic` counts them.
    """

    # With thousands of simulated workers each cache line that a step touches is a cache miss.
    __slots__ = (
        "_begin",
        "_gradients_ready",
        "_inside_before",
        "_observer",
        "_rank",
        "_sent_before",
        "_traffic",
        "_uses",
        "_zero_gradients",
        "announces",
        "bytes_inside",
        "bytes_sent",
        "defers",
        "flat",
        "note_mean",
        "part",
        "plan",
        "workers",
    )

    def __init__(self, strategy: Strategy, world: World, setting: WorkerSetting, *, announce: bool) -> None:
        self.workers: Communicator = setting.workers
        self.flat = setting.flat
        self.plan = setting.plan
        self.part = strategy.worker(setting)
        if world.opened is not None:
            world.opened(self.part, self.flat)
        self.defers = False
        self.note_mean: Callable[[], None] | None = None
        self.announces = announce and self.part.uses("bucket_ready") and self.workers.size > 1
        self.bytes_sent = self.bytes_inside = 0
        self._traffic = world.network.traffic
        self._observer, self._rank = world.observer, world.network.rank
        self._sent_before = self._inside_before = 0
        self._gradients_ready = self.part.gradients_ready
        # Calls without effect are avoided: thousands of workers would make them in every step.
        self._begin = self.part.begin if self.part.uses("begin") else None
        self._uses = self.part.before_use if self.part.uses("before_use") else None
        self._zero_gradients = None if self.flat.still else self.flat.zero_gradients

    def part_as(self, kind: type[Kind]) -> Kind:
        """Return the worker part, which is of this kind by the traits of its strategy."""
        assert isinstance(self.part, kind), f"the strategy's part is a {kind.__name__}"
        return self.part

    @property
    def outlook(self) -> PipelineForecast | None:
        """Forecast of the run, on rank 0, where the worker part computes stages of the network."""
        return self.part.outlook if isinstance(self.part, ComputesStages) else None

    def pass_shares(self, shares: tuple[float, ...]) -> tuple[float, ...]:
        """Return the fractions of a simulated pass, one per bucket; empty if the strategy ignores announcements."""
        return shares if self.announces or self._uses is not None else ()

    def announce(self, bucket: int) -> None:
        """Announce that a bucket's gradients are final."""
        if self.announces and not self.defers:
            self.part.bucket_ready(bucket)

    def use(self, bucket: int) -> None:
        """Announce that a bucket's parameters are about to be used; for passes without hooks."""
        if self._uses is not None:
            self._uses(bucket)

    def begin(self, step: Step) -> None:
        """Begin a step with zero gradients and no bucket announced."""
        traffic = self._traffic  # a task in the background sends at any time of the step
        self._sent_before, self._inside_before = traffic.bytes_sent, traffic.bytes_inside
        begin = self._begin
        if begin is not None:
            begin(step)

    def exchange(self, step: Step, learning_rate: float) -> bool:
        """End a step: exchange the gradients, update the parameters, and zero the gradients.

        Args:
            step: the step given to `begin`; its weight may be lower if no bucket has been announced.
            learning_rate: learning rate of the update.

        Returns:
            Whether to stop.
        """
        # Methods that call what an attribute holds would look it up again at each call.
        gradients_ready, zero_gradients = self._gradients_ready, self._zero_gradients
        stop = gradients_ready(step, learning_rate)
        if self.note_mean is not None:
            self.note_mean()
        if self._observer is not None:
            exchanger = self.part.exchanger
            if exchanger is not None and exchanger.relayed:  # the step is that of an earlier view
                exchanger.relayed = False
                self._observer.caught_up(self._rank, step.number + 1)
            else:
                self._observer.stepped(self._rank, step.number, self.flat.vector)
        if zero_gradients is not None:
            zero_gradients()
        traffic = self._traffic  # as `_count_sent`: a call less in each step
        self.bytes_sent += traffic.bytes_sent - self._sent_before
        self.bytes_inside += traffic.bytes_inside - self._inside_before
        return stop

    def average(self, step: Step, place: int = 0) -> None:
        """Overwrite the gradients with the workers' mean, where the part holds it."""
        self.begin(step)
        self.part.average(step, place)
        self._count_sent()

    def update(self, step: int, learning_rate: float) -> None:
        """Update the parameters with averaged gradients, and keep the gradients."""
        self.part.update(learning_rate)
        if self._observer is not None:
            self._observer.stepped(self._rank, step, self.flat.vector)

    def settle(self) -> None:
        """Complete pending exchanges and updates; their bytes count as the steps'."""
        traffic = self._traffic
        self._sent_before, self._inside_before = traffic.bytes_sent, traffic.bytes_inside
        self.part.settle()
        self._count_sent()

    def _count_sent(self) -> None:
        """Count the bytes sent since the values that were noted before."""
        traffic = self._traffic
        self.bytes_sent += traffic.bytes_sent - self._sent_before
        self.bytes_inside += traffic.bytes_inside - self._inside_before


class Replica(FlatReplica):
    """One worker's copy of a model, and the worker part of a strategy, tied together by hooks.

    Args:
        model: model, changed in place: its parameters become views of one vector.
        optimizer: optimizer over the model's parameters; only its class and options are read, once.
        strategy: strategy, which makes the worker part.
        world: context of the rank.
        announce: whether buckets are announced during the backward pass. Off where a step may hold several
            backward passes.
        steps: number of steps of every worker in the whole run; None if unknown.
        own_loop: whether a user's own loop trains it: with the user's own optimizer object where a worker
            holds the whole vector, and with frozen parameters of the optimizer, which may be thawed, in the
            vector.
        joined: see `WorkerSetting`.

    Attributes:
        model: the given model.
        peak: function that returns the peak memory of this worker, in bytes; None: it is not measured.
        run_hook: function that runs a model hook; an owner that recovers from `PeerLost` replaces it.
        test_waits: time for which its tests waited for images.
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
        own_loop: bool = False,
        joined: Callable[[Communicator], None] = lambda workers: None,
    ) -> None:
        self.model = model
        self.test_waits = ImageWaits()
        workers = world.workers()
        like = next(model.parameters())
        asked = strategy.bucket_bytes_for(workers, like) if isinstance(strategy, SizesBuckets) else None
        options: dict[str, Any] = {} if asked is None else {"bucket_bytes": asked}
        if own_loop:
            options["also"] = [each for group in optimizer.param_groups for each in group["params"]]
            options["mixed"] = True
        # Workers with parts of a network have gradients of their own parts only.
        ranks = workers.size
        if isinstance(strategy, HasStages):
            ranks = len(strategy.workers_of_ranks(workers.size))
        elsewhere = ranks > 1 and strategy.traits(workers.size).cuts_network
        flat = FlatParameters(model, elsewhere=elsewhere, **options)
        made = compressor_of(strategy)
        if made is not None and made.from_passes:
            flat.collect_factors(model)
        setting = WorkerSetting(
            world.network,
            workers,
            world.roles,
            flat,
            OptimizerPlan.of(optimizer, flat, keeps=own_loop),
            steps,
            succeeds=world.rejoins,
            leader_returns=world.leader_returns,
            joined=joined,
        )
        super().__init__(strategy, world, setting, announce=announce)
        if own_loop and self.part.follows is not OptimizerSource.OBJECT:
            OptimizerPlan.of(optimizer, flat)  # of any class only where the object itself makes the steps
        own = self.plan.own
        if own is not None and own.asks_for_closure and not self.part.holds_mean:
            raise RequestError(
                f"{self.plan.kind} needs a closure at every step: use synchronous, or another optimizer"
            )
        self.peak: Callable[[], int] | None = None
        self.run_hook: Callable[[Callable[[], object]], object] = lambda act: act()
        self._parameters = [len(bucket.parameters) for bucket in flat.buckets]
        self._missing: list[int] = []
        self._next_bucket = 0
        if self.announces and world.pace is None:
            self._hook_gradients()
        # Some strategies wait for nothing that is not announced.
        waits = self.announces or not strategy.traits(workers.size).overlaps_passes
        if self._uses is not None and waits and world.pace is None:
            self._hook_uses()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name (batch-norm statistics): each worker's own, never averaged in training."""
        return dict(self.model.named_buffers())

    @property
    def untrained(self) -> dict[str, Tensor]:
        """Tensors outside the flat vector, by name: buffers, and parameters that are frozen for good."""
        flat = {view.name for view in self.flat.views}
        frozen = {
            name: parameter.data for name, parameter in self.model.named_parameters() if name not in flat
        }
        return self.buffers | frozen

    def share_untrained(self) -> None:
        """Overwrite untrained tensors with worker 0's; before a checkpoint gives every worker its own buffers."""
        for value in self.untrained.values():
            # Layers of other workers have shapes only.
            self.workers.broadcast(torch.empty_like(value, device="cpu") if value.is_meta else value)

    @contextmanager
    def computing_with(self, parameters: Tensor, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model compute with other memory, and without the strategy, within the context.

        Args:
            parameters: `(size,)`, the parameters.
            buffers: buffers by name.
        """
        own = {id(tensor): tensor.data for tensor in (*self.model.parameters(), *self.buffers.values())}
        hook, self.run_hook = self.run_hook, lambda act: None
        for view in self.flat.views:
            view.parameter.data = parameters[view.start : view.stop].view(view.parameter.shape)
        for name, value in self.buffers.items():
            value.data = buffers[name]
        try:
            yield
        finally:
            self.run_hook = hook
            for tensor in (*self.model.parameters(), *self.buffers.values()):
                tensor.data = own[id(tensor)]

    def begin(self, step: Step) -> None:
        self._missing = self._parameters.copy()
        self._next_bucket = 0
        super().begin(step)

    def recount(self, passes: int) -> bool:
        """Expect this many more backward passes in this step; return whether no bucket has been announced yet."""
        self._missing = [count * passes for count in self._parameters]
        return self._next_bucket == 0 or self.defers

    def _hook_gradients(self) -> None:
        for number, bucket in enumerate(self.flat.buckets[:-1]):  # with the last, the pass is over
            for position in bucket.parameters:
                parameter = self.flat.views[position].parameter

                def ready(_: Tensor, number: int = number) -> None:
                    self._count_down(number)

                parameter.register_post_accumulate_grad_hook(ready)

    def _count_down(self, bucket: int) -> None:
        """Announce buckets in their order, in whatever order autograd fills them; the last needs no announcement."""
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
            # Including all submodules: attention, for one, uses its projection's weights without calling the
            # projection.
            used = sorted({bucket_of[inner] for inner in module.parameters() if inner in bucket_of})

            def before(_module: nn.Module, _inputs: object, used: list[int] = used) -> None:
                for bucket in used:
                    self.run_hook(lambda: self.part.before_use(bucket))  # noqa: B023 (called at once)

            module.register_forward_pre_hook(before)
        self.model.register_state_dict_pre_hook(lambda *_: self.run_hook(self.settle))
