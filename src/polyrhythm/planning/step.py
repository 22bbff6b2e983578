"""Breakdown of a training step: data, forward, backward, update, and layer by layer.

Layers are timed by hooks on a model that trains as usual.

Next to it, what an update costs a server's processor, by a real server's part that is given gradients:

    seconds(n) = a + 4 n / b      n numbers of float32; a: of any message, b: bytes/s

A server of `parameter_server` takes each gradient as its own update and answers with its shard, which is copied to the
link. Measured with the model's smallest tensor, and with all of it: a shard that fits a cache is faster.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous
from polyrhythm.data.loader import Batch
from polyrhythm.roles.job import Job
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.roles.step_metrics import finish_work
from polyrhythm.roles.world import World
from polyrhythm.simulation.cluster import ServerUpdate
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


@dataclass(frozen=True)
class Layer:
    """A layer's share of a step.

    Attributes:
        name: name of the module.
        kind: class of the module.
        parameters: number of its trained parameters.
        forward_s: median seconds of its forward pass, or of all of them if it is used several times; 0 for a module
            with others inside.
        backward_s: median seconds from the moment at which the gradients of the layers behind it were final to the
            moment at which its own are. So a layer without parameters counts with the one before it; its own is 0.
    """

    name: str
    kind: str
    parameters: int
    forward_s: float
    backward_s: float


_Shapes = tuple[torch.Size, ...]


class LayerClocks:
    """Timing of a model's layers, step by step.

    Args:
        model: model to time; gets a hook, and with `watch` hooks on all leaf modules and all parameters.
        now: function that returns the time in seconds, once the device has finished its work.
    """

    def __init__(self, model: nn.Module, now: Callable[[], float]) -> None:
        self._now = now
        self._model = model
        self._forward_end = 0.0
        self._begun: dict[str, float] = {}
        self._forward: dict[str, float] = {}
        self._ready: dict[str, float] = {}
        self._forwards: dict[str, list[float]] = defaultdict(list)
        self._backwards: dict[str, list[float]] = defaultdict(list)
        self._layers: dict[str, nn.Module] = {}
        self._given: list[_Shapes] = []
        self._used: dict[str, list[_Shapes]] = defaultdict(list)
        self._uses: dict[tuple[_Shapes, ...], dict[str, tuple[_Shapes, ...]]] = {}
        self._varied: dict[str, None] = {}
        model.register_forward_hook(self._end_forward, with_kwargs=True)

    def watch(self) -> None:
        """Time leaf modules, and modules with parameters of their own, from now on.

        A GPU's steps take longer then, since each layer waits for its work.
        """
        self._layers = {
            name: module
            for name, module in self._model.named_modules()
            if next(module.children(), None) is None or any(True for _ in module.parameters(recurse=False))
        }
        for name, module in self._layers.items():
            self._hook(name, module)

    def end_step(self) -> float:
        """Add a step to the samples; return the time at which its forward pass ended."""
        for name, seconds in self._forward.items():
            self._forwards[name].append(seconds)
        before = self._forward_end
        for name, at in sorted(self._ready.items(), key=lambda entry: entry[1]):
            self._backwards[name].append(at - before)
            before = at
        if self._layers:
            self._compare_uses()
        self._forward, self._ready, self._given = {}, {}, []
        return self._forward_end

    def _compare_uses(self) -> None:
        uses = {name: tuple(shapes) for name, shapes in self._used.items()}
        before = self._uses.setdefault(tuple(self._given), uses)
        for name in self._layers:
            if uses.get(name) != before.get(name):
                self._varied[name] = None
        self._used.clear()

    @property
    def varied(self) -> tuple[str, ...]:
        """Modules that had inputs of other shapes in another step, or none, at equal shapes of the model's inputs."""
        return tuple(self._varied)

    def read(self, skip: int) -> tuple[Layer, ...]:
        """Return the medians of every layer, in the order of the model.

        Args:
            skip: number of steps at the beginning that do not count.
        """
        return tuple(
            Layer(
                name,
                type(module).__name__,
                sum(each.numel() for each in module.parameters(recurse=False) if each.requires_grad),
                statistics.median(self._forwards[name][skip:] or [0.0]),
                statistics.median(self._backwards[name][skip:] or [0.0]),
            )
            for name, module in self._layers.items()
        )

    def _hook(self, name: str, module: nn.Module) -> None:
        def begin(_module: nn.Module, inputs: tuple[object, ...]) -> None:
            self._used[name].append(_shapes_in(inputs))
            self._begun[name] = self._now()

        def end(_module: nn.Module, _inputs: object, _output: object) -> None:
            self._forward[name] = self._forward.get(name, 0.0) + self._now() - self._begun[name]

        def ready(_: Tensor) -> None:
            self._ready[name] = self._now()  # with several parameters, at the last one

        if next(module.children(), None) is None:  # the time of other modules is that of those inside
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ready)

    def _end_forward(
        self, _model: nn.Module, inputs: tuple[object, ...], named: dict[str, object], _output: object
    ) -> None:
        self._forward_end = self._now()
        self._given.append(_shapes_in((*inputs, *named.values())))


def _shapes_in(values: Iterable[object]) -> _Shapes:
    return tuple(each.shape for each in values if isinstance(each, Tensor))


WARM_UP = 3
"""Steps that are not measured, since the first ones allocate memory and load kernels."""
_FIRST_WATCHED, _LEAST_WATCHED = 1, 5
"""Further steps for the layers: those that do not count, and those that do, at least."""


def watched_steps(steps: int) -> tuple[int, int]:
    """Return in how many further steps the layers are timed: those to skip, and those that count."""
    return _FIRST_WATCHED, max(_LEAST_WATCHED, steps // 3)


@dataclass(frozen=True)
class StepProfile:
    """A model's step on one worker.

    Attributes:
        step_s: seconds of every measured step, without waiting for data.
        data_s: median seconds of waiting for the step's batch.
        forward_s: median seconds, with copying the batch to the device.
        backward_s: median seconds, with the loss.
        update_s: median seconds of the optimizer, and of everything else after the backward pass.
        layers: layers in the order of the forward pass.
        varied: layers that were used otherwise from step to step, at equal shapes of the model's inputs.
    """

    step_s: tuple[float, ...]
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float
    layers: tuple[Layer, ...]
    varied: tuple[str, ...] = ()

    @property
    def median_s(self) -> float:
        """Median of `step_s`."""
        return statistics.median(self.step_s)

    @property
    def sigma(self) -> float:
        """Spread of the steps: the standard deviation of their logarithms."""
        return statistics.pstdev(map(math.log, self.step_s))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        parts = {name: getattr(self, name) for name in ("data_s", "forward_s", "backward_s", "update_s")}
        return {
            "steps": len(self.step_s),
            "step_s": self.median_s,
            **parts,
            "layers": [dict(vars(layer)) for layer in self.layers],
        }


def profile_step(job: Job, steps: int) -> StepProfile:
    """Time the parts of some training steps on one worker alone.

    Args:
        job: training job, with a strategy of one worker and no server.
        steps: number of steps to measure, after a few for warming up.

    Raises:
        RequestError: the loss is not finite.
    """

    def now() -> float:
        finish_work(job.device)
        return time.perf_counter()

    home, network = connect(Rendezvous(dist.HashStore(), 0, 1, LOOPBACK))
    try:
        workload = ModelWorkload(job, World(network, RoleAssignment((0,))))
        workload.replica.part.start(0)
        layers = LayerClocks(workload.replica.model, now)
        epochs = cycle(range(len(workload.calendar.dealt)))  # as often as the measurement takes
        batches = chain.from_iterable(workload.batches(epoch, 0) for epoch in epochs)
        parts = [_parts(workload, batches, now, layers) for _ in range(WARM_UP + steps)]
        layers.watch()
        for _ in range(sum(watched_steps(steps))):
            _parts(workload, batches, now, layers)
    finally:
        home.close()
    kept = parts[WARM_UP:]
    data, forward, backward, update = (statistics.median(times) for times in zip(*kept, strict=True))
    whole = tuple(sum(times[1:]) for times in kept)
    return StepProfile(whole, data, forward, backward, update, layers.read(_FIRST_WATCHED), layers.varied)


def _parts(
    workload: ModelWorkload, batches: Iterator[Batch], now: Callable[[], float], layers: LayerClocks
) -> tuple[float, float, float, float]:
    """Take a step; return the seconds of data, forward, backward and update."""
    asked_at = now()
    batch = next(batches)
    begun_at = now()
    step = Step(batch.step, batch.size / workload.batch_size)
    workload.replica.begin(step)
    _, rate, usable = workload.compute(step, batch)
    backward_at = now()
    workload.replica.exchange(step if usable else Step(step.number, 0.0), rate * workload.rate_ratio)
    ended_at = now()
    forward_end = layers.end_step()
    return begun_at - asked_at, forward_end - begun_at, backward_at - forward_end, ended_at - backward_at


_WORKER, _SERVER = 0, 1
_UPDATES = 15
_SCALE = 1e-3
"""Scale of the gradients, so that parameters stay ordinary numbers."""


def measure_server_update(job: Job, most_bytes_per_s: float) -> ServerUpdate | None:
    """Time a server's updates with a job's optimizer and as many numbers as its model has.

    Compute threads are the caller's; a server has one.

    Args:
        job: job with the model and optimizer.
        most_bytes_per_s: upper bound of the result, such as the speed of copying: for a small model, noise
            hides the cost of its numbers relative to that of the message.

    Returns:
        What they cost; None for an optimizer that looks at all workers' data, which servers cannot run.
    """
    model = job.make_model()
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(job.learning.optimizer.create(model.parameters()), flat)
    if plan.joint is not None:
        return None
    least = min(flat.views, key=lambda view: view.stop - view.start)
    part = flat.vector[least.start : least.stop].clone()
    least_s = _update_s(replace(plan, clip_norm=None).part(least.start, least.stop), part)
    whole_s, more = _update_s(plan, flat.vector), flat.vector.nbytes - part.nbytes
    more_s = max(whole_s - least_s, more / most_bytes_per_s)
    bandwidth = more / more_s if more else most_bytes_per_s
    return ServerUpdate(seconds=min(least_s, whole_s), bandwidth_bytes_per_s=bandwidth)


def _update_s(plan: OptimizerPlan, values: Tensor) -> float:
    """Return the median seconds of processor from a gradient's arrival until its answer is where a link takes it from.

    All of it is this thread's, so what other processes do in the meantime does not count.
    """
    server = ParameterServer().server(ServerSetting(0, RoleAssignment((_WORKER,), (_SERVER,))))
    server.on_message(_WORKER, Message(Kind.CONFIGURE, pack_json(plan.to_json())))
    server.on_message(_WORKER, Message(Kind.PARAMETERS, values))
    server.on_message(_WORKER, Message(Kind.PULL))
    gradient, link, version, seconds = _SCALE * torch.randn_like(values), torch.empty_like(values), 0, []
    for step in range(WARM_UP + _UPDATES):
        push = Message(Kind.PUSH, gradient, version, step, 1.0, plan.rate)
        began_s = time.thread_time()
        [(_, answer)] = server.on_message(_WORKER, push)
        assert answer.tensor is not None, "a server answers with its parameters"
        link.copy_(answer.tensor)
        seconds.append(time.thread_time() - began_s)
        version = answer.version
    return statistics.median(seconds[WARM_UP:])
