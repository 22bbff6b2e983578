"""DiLoCo: an outer optimizer uses the change made by a round of local steps as a gradient.

Douillard, Feng, Rusu, Chhaparia, Donchev et al., "DiLoCo: distributed low-communication training of language models",
2023, arXiv 2311.08105.

    d = w - mean_i w_i                            after H local steps from w on each worker
    v <- m * v + d;   w <- w - lr * (d + m * v)   outer SGD with Nesterov's momentum

H = `steps`; lr and m are options of `outer`, which may be any optimizer. The inner optimizer is the run's own. Its
state stays on its worker and is never averaged, as in the paper. Batch-norm statistics are never averaged in training.

With `fragments`, `delay` or `mixing` it is streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512): fragments of
the model are averaged in turn while training continues; see `StreamingWorker`.

Departure from the paper: the paper uses H = 500 in runs of 88,000 steps. The default here is short enough for runs of a
few hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.exchanger import Exchanger, Sums
from polyrhythm.communication.log import MODELS, Result
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.averaging.rounds.averaging import CompressedAveraging
from polyrhythm.strategies.averaging.rounds.model_mean import LocalOptimizer, ModelMean
from polyrhythm.strategies.averaging.rounds.rounds_worker import Outer, Rounds, RoundsWorker
from polyrhythm.strategies.resharding import Resharding, same_for_all
from polyrhythm.strategies.state import JOINING, OWN, Part, State, StateField, Stateful, below, prefixed
from polyrhythm.strategies.strategy import Facts, Paper, Traits, needs_as_many
from polyrhythm.strategies.worker_part import Logged, OptimizerSource, Step, WorkerPart, WorkerSetting, Writes
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.flat_parameters import TAIL, FlatParameters, shards
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan, SlicedOptimizer
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.quantities import Count

_OPTIMIZERS = "polyrhythm.training.optimizers"


class DiLoCo(CompressedAveraging):
    """Workers take local steps for a round; an outer optimizer then uses the mean change as its gradient.

    Attributes:
        steps: number of local steps of each worker in a round.
        outer: outer optimizer; its gradient is the mean change of a round.
        fragments: number of fragments of the model; each is averaged once in `steps` steps.
        delay: number of steps between sending a fragment and applying its mean, while training continues.
        mixing: weight of a worker's own fragment when its mean is applied, in [0, 1]; 0 replaces it, 1 keeps it.
        collective: algorithm that sums the models.
    """

    paper: ClassVar[Paper] = Paper(
        "Douillard, Feng, Rusu, Chhaparia, Donchev et al.",
        "DiLoCo: distributed low-communication training of language models",
        "arXiv",
        2023,
        "2311.08105",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="distant machines that can communicate only every few hundred steps",
    )

    steps: Count = 32
    fragments: Count = 1
    delay: int = Field(default=0, ge=0)
    mixing: float = Field(default=0.0, ge=0, le=1)
    outer: Annotated[OptimizerConfig, chosen("outer optimizer", _OPTIMIZERS)] = SGD(
        lr=0.7, momentum=0.9, nesterov=True
    )

    @field_validator("outer", mode="before")
    @classmethod
    def _needs_one(cls, value: Any) -> Any:
        if value is None:
            raise RequestError(
                "diloco needs an outer optimizer: give outer=sgd(lr=0.7, momentum=0.9, nesterov=true), or use local_sgd"
            )
        return value

    @property
    def period(self) -> int:
        return self.steps

    @property
    def streams(self) -> bool:
        """Whether it is streaming DiLoCo."""
        return self.fragments > 1 or self.delay > 0 or self.mixing > 0

    @property
    def every(self) -> int:
        """Number of steps from one fragment's mean to the next."""
        return self.steps // self.fragments

    def starts(self, step: int) -> bool:
        """Whether the mean of a fragment is started after a step."""
        return step % self.every + 1 == self.every - self.delay

    def ends(self, step: int) -> bool:
        """Whether the mean of a fragment is applied after a step."""
        return step % self.every + 1 == self.every

    def turn(self, step: int) -> int:
        """Return the number of the fragment that is averaged in the interval of a step."""
        return step // self.every % self.fragments

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if self.steps % self.fragments:
            raise RequestError(
                f"diloco: steps={self.steps} is not divisible by fragments={self.fragments}: make steps a multiple of "
                "fragments"
            )
        every = self.every
        if self.delay >= every:
            raise RequestError(
                f"diloco: a fragment is averaged every {every} steps (steps / fragments), and with delay={self.delay} "
                f"its mean would arrive too late: give delay at most {every - 1}"
            )

    def check_model(self, flat: FlatParameters) -> None:
        super().check_model(flat)
        if self.streams:
            fragments_of(flat, self.fragments)

    def traits(self, workers: int) -> Traits:
        found = super().traits(workers)
        if not self.streams:
            return found
        return replace(found, local_models=workers > 1, exchange_every=self.every)

    def resharding(self, before: int, after: int) -> Resharding:
        if not self.streams:
            return super().resharding(before, after)
        if before != after:
            raise needs_as_many(self, before)
        return same_for_all(after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        if self.streams:
            return StreamingWorker(setting, self)
        outer = OuterOptimizer(self.outer, setting.flat)
        rounds = Rounds(steps=self.steps, collective=self.collective, outer=outer, mean=self.mean)
        return RoundsWorker(setting, rounds)


class OuterOptimizer(Outer):
    """Update rule of this module; see `Outer`.

    Args:
        optimizer: configuration of the outer optimizer.
        flat: parameters of the model.
    """

    fields = StateField("model", Tensor), StateField("", Part, at="_optimizer")

    def __init__(self, optimizer: OptimizerConfig, flat: FlatParameters) -> None:
        self._rate = optimizer.lr
        self._plan = OptimizerPlan.of(optimizer.create([view.parameter for view in flat.views]), flat)
        self._model = flat.vector.new_empty(0)
        self._optimizer: FlatOptimizer

    def start(self, vector: Tensor) -> None:
        """Start the first round at `vector`, `(size,)`."""
        self._model = vector.clone()
        self._optimizer = self._plan.build(self._model)

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Replace the mean of all models in `vector` by the starting point of the next round, in place."""
        self._optimizer.step(self._model - vector, self._rate)
        vector.copy_(self._model)


Fragment = tuple[slice, ...]
"""Slices of the flat vector that are averaged together."""


def fragments_of(flat: FlatParameters, count: int) -> list[Fragment]:
    """Cut a model's vector into `count` fragments: layer i, a module with own parameters, is in fragment i mod `count`.

    Raises:
        RequestError: the model has fewer parameter values than `count`.
    """
    layers: dict[str, list[slice]] = {}
    for view in flat.views:
        layer = view.name.rpartition(".")[0] or view.name
        stretches = layers.setdefault(layer, [])
        if stretches and stretches[-1].stop == view.start:
            stretches[-1] = slice(stretches[-1].start, view.stop)
        else:
            stretches.append(slice(view.start, view.stop))
    if len(layers) < count:
        if flat.size < count:
            raise RequestError(f"{count} fragments of a model of {flat.size} numbers: ask for fewer")
        return [(stretch,) for stretch in shards(flat.size, count)]
    found: list[list[slice]] = [[] for _ in range(count)]
    for number, stretches in enumerate(layers.values()):
        found[number % count] += stretches
    return [tuple(fragment) for fragment in found]


def numbers_of(fragment: Fragment) -> int:
    """Return the number of parameter values in a fragment."""
    return sum(place.stop - place.start for place in fragment)


def taken(vector: Tensor, fragment: Fragment) -> Tensor:
    """Return a copy of the values of a fragment, `(n,)`."""
    return torch.cat([vector[stretch] for stretch in fragment])


class FragmentMean(Stateful):
    """Mean of one fragment's changes over all workers, computed in the background.

    Args:
        workers: communicator of the participating workers.
        add_up: all-reduce that sums the fragments one after the other.
        numbers: number of values in the fragment.
    """

    def __init__(self, workers: Communicator, add_up: AllReduce, numbers: int) -> None:
        self._alone = workers.size == 1
        self._add_up = add_up
        self._numbers = numbers

    def over(self, workers: Communicator, add_up: AllReduce) -> FragmentMean:
        """Return the same mean over other workers."""
        return FragmentMean(workers, add_up, self._numbers)

    def start(self, movement: Tensor, step: Step) -> Callable[[], Result]:
        """Start the mean; return a function that waits for it. Its vector is None if all weights are 0."""
        if self._alone:
            return lambda: Result(movement if step.weight > 0 else None, step.weight, step.stop)
        outgoing = movement.new_empty(self._numbers + TAIL)
        torch.mul(movement, step.weight, out=outgoing[: self._numbers])
        outgoing[self._numbers :] = outgoing.new_tensor([step.weight, float(step.stop)])
        handle = self._add_up.start(outgoing)

        def arrived() -> Result:
            handle.wait()
            total, stops = outgoing[self._numbers :].tolist()
            return Result(outgoing[: self._numbers].div_(total) if total > 0 else None, total, stops > 0)

        return arrived

    def commit(self) -> None:
        """Treat the last mean as complete: it was so on other workers."""


class CompressedFragmentMean(FragmentMean):
    """`FragmentMean` of compressed changes; see `strategies.compressed_mean`."""

    fields = (StateField("", Part, at="_mean"),)

    def __init__(
        self,
        workers: Communicator,
        add_up: AllReduce,
        layers: Sequence[Tensor],
        terms: DiLoCo,
        stands_for: float,
    ) -> None:
        from polyrhythm.strategies.compressed_mean import CompressedMean  # no other run pays for it

        assert terms.compress is not None, "else `FragmentMean` is used"
        super().__init__(workers, add_up, sum(layer.numel() for layer in layers))
        self._workers = workers
        model = nn.ParameterList(nn.Parameter(torch.zeros_like(layer)) for layer in layers)
        self._flat = FlatParameters(model, stands_for=stands_for)
        self._mean = CompressedMean(workers, self._flat, terms.compress, terms.collective)

    def over(self, workers: Communicator, add_up: AllReduce) -> CompressedFragmentMean:
        made = copy(self)
        FragmentMean.__init__(made, workers, add_up, self._numbers)
        made._workers, made._mean = workers, self._mean.over(workers)
        return made

    def start(self, movement: Tensor, step: Step) -> Callable[[], Result]:
        if self._alone:
            return super().start(movement, step)
        self._flat.gradients.copy_(movement)

        handle: Handle = self._workers.start(lambda: self._mean.finish(step))

        def arrived() -> Result:
            total, stops = handle.wait()
            return Result(self._flat.gradients.clone() if total > 0 else None, total, stops)

        return arrived

    def commit(self) -> None:
        self._mean.commit()


class FragmentMeans(Sums):
    """Means of all fragments, and of whole models, over the same workers.

    Args:
        workers: communicator of the participating workers.
        flat: parameters of this worker.
        terms: options of the strategy.
        fragments: fragments of the model.

    Attributes:
        whole: mean of whole models.
        latest: number of the fragment with the latest started mean.
    """

    def __init__(
        self, workers: Communicator, flat: FlatParameters, terms: DiLoCo, fragments: Sequence[Fragment]
    ) -> None:
        self._alone = workers.size == 1
        self._add_up = AllReduce(terms.collective, workers, "fragments", in_turn=True)
        self.whole = ModelMean(workers, flat, terms.collective)
        self.latest = 0
        self._means = [self._mean_of(fragment, workers, flat, terms) for fragment in fragments]

    def over(self, workers: Communicator) -> FragmentMeans:
        """Return the same means over other workers, with the existing measurements of the links."""
        made = copy(self)
        made._alone = workers.size == 1
        made._add_up = AllReduce(self._add_up.passed_on(), workers, "fragments", in_turn=True)
        made.whole = self.whole.over(workers)
        made._means = [mean.over(workers, made._add_up) for mean in self._means]
        return made

    def prepare(self) -> None:
        """Let the collectives measure the links, if they need to; all workers must call it."""
        if not self._alone:
            self._add_up.prepare()
            self.whole.prepare()

    def commit(self) -> None:
        """Treat the latest mean of a fragment as complete: it was so on other workers."""
        self._means[self.latest].commit()

    def start(self, number: int, movement: Tensor, step: Step, before: State | None) -> Callable[[], Result]:
        """Start the mean of a fragment's changes; return a function that waits for it.

        Args:
            number: number of the fragment.
            movement: change of this worker's fragment, `(n,)`.
            step: step of this worker, with the weight of the change.
            before: compression state before a failed mean of the same change, to be restored; None: no mean failed.
        """
        self.latest = number
        if before is not None:
            self._means[number].load_state(before)
        return self._means[number].start(movement, step)

    def kept(self, number: int) -> State:
        """Return the compression state of a fragment's mean."""
        return ({}, {}) if self._alone else self._means[number].state()

    def state(self) -> tuple[dict[str, Tensor], list[Any]]:
        """Return the compression states of all fragments."""
        named, stated = dict[str, Tensor](), []
        for number, mean in enumerate(self._means):
            tensors, facts = mean.state()
            named |= prefixed(f"{number}.", tensors)
            stated.append(facts)
        return named, stated

    def load_state(self, state: tuple[dict[str, Tensor], Sequence[Any]]) -> None:
        """Restore what `state` returned."""
        tensors, stated = state
        for number, (mean, facts) in enumerate(zip(self._means, stated, strict=False)):
            mean.load_state((below(f"{number}.", tensors), facts))

    def _mean_of(
        self, fragment: Fragment, workers: Communicator, flat: FlatParameters, terms: DiLoCo
    ) -> FragmentMean:
        """Return the mean of a fragment; it is uncompressed where no layer is large enough to be compressed."""
        plain = FragmentMean(workers, self._add_up, numbers_of(fragment))
        if terms.compress is None:
            return plain
        inside = [
            view
            for place in fragment
            for view in flat.views
            if place.start <= view.start and view.stop <= place.stop
        ]
        layers: list[Tensor] = [view.gradient for view in inside]
        if sum(view.stop - view.start for view in inside) != numbers_of(fragment):  # it cuts layers
            layers = [flat.gradients[place] for place in fragment]
        try:
            return CompressedFragmentMean(workers, self._add_up, layers, terms, flat.stands_for)
        except RequestError:
            return plain


class StreamingWorker(Logged):
    """Takes local steps while the fragments of the model are averaged in turn in the background.

    Douillard, Donchev, Rush, Kale, Charles et al., "Streaming DiLoCo with overlapping communication: toward a
    distributed free lunch", 2025, arXiv 2501.18512.

        after local step h - tau   d = mean_i (g - w_i)              of the next fragment; the mean is started here
        after local step h         g <- outer(g, d)                  g: the fragment's global value, equal on all
                                   w_i <- (1 - alpha) g + alpha w_i  w_i: its current value

        worker 0   step step step step │ step step step step │ step …        h = H / P steps from one fragment to the
                           fragment 0 ▔▔▔          fragment 1 ▔▔▔            next: each of P once in H

    H = `steps`, P = `fragments`, tau = `delay`, alpha = `mixing`. With one fragment and neither delay nor mixing it is
    DiLoCo. Fragments are strided: layer i belongs to fragment i mod P. A model with fewer layers than fragments is cut
    into equal slices.

    A stop request is sent with a mean, so all workers receive it after the same step. When a run ends, the pending mean
    is applied, and all fragments that have changed since their last mean are averaged once more, so that all workers
    have the same model.

    A mean is an entry of the log (see `communication.log`), and a change is kept until its mean has arrived. A joining
    worker starts at g, and contributes nothing to the pending mean.

    Departure from the paper: its 4-bit floats are one of the choices of `compress`, each with or without error
    feedback.

    Args:
        setting: setting of the worker.
        terms: options of the strategy.
    """

    fields = (
        StateField("vector", Tensor, at="_flat.vector"),
        StateField("global", Tensor),
        StateField("optimizer", Part),
        StateField("outer", Part, at="_outer.pieces"),
        StateField("moved", list[bool]),
        StateField("shares", float),
        StateField("counted", int),
        StateField("sent", tuple[int, int] | None),
        StateField("kept", Part, OWN, at="exchanger.sums"),
        StateField("heard", bool, JOINING, at="_received"),
        StateField("done", int, JOINING),
    )
    exchanger: Exchanger[FragmentMeans]

    def __init__(self, setting: WorkerSetting, terms: DiLoCo) -> None:
        super().__init__()
        flat = setting.flat
        self._flat, self._terms = flat, terms
        self._optimizer = LocalOptimizer(setting.plan, flat, "keep")
        self.writes = Writes.KEPT
        self.follows = OptimizerSource.OBJECT if self._optimizer.is_own else OptimizerSource.NOTHING
        self._fragments = fragments_of(flat, terms.fragments)
        places = [stretch for fragment in self._fragments for stretch in fragment]
        self._numbers = {(place.start, place.stop): number for number, place in enumerate(places)}
        self._places = places
        self._outer_rate = terms.outer.lr
        self._outer_plan = OptimizerPlan.of(terms.outer.create([view.parameter for view in flat.views]), flat)
        self.exchanger = Exchanger(
            setting.workers, FragmentMeans(setting.workers, flat, terms, self._fragments)
        )
        self.exchanger.keeps = True
        self._sent: tuple[int, int] | None = None
        """Number of the fragment with a pending mean, and the step after which that mean was started."""
        self._moved = [False] * terms.fragments
        self._shares, self._counted = 0.0, 0
        self._stops = self._received = False
        self._done = 0
        self.initialize()

    def start(self, step: int) -> int:
        self._done = step
        return super().start(step)

    def since(self, step: int) -> int:
        return step - step % self._terms.every

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        terms, number = self._terms, step.number
        self._stops |= step.stop
        self._shares, self._counted = self._shares + step.share, self._counted + 1
        if step.weight > 0:
            self._optimizer.step(learning_rate)
            self._moved = [True] * terms.fragments
            self.staleness[0] += 1
        turn = terms.turn(number)
        if terms.starts(number) and self._sent != (turn, number):
            self._send(turn, number)
        if terms.ends(number):
            self._adopt(turn, terms.mixing)
            self.exchanger.since = number + 1
        self._done = number + 1
        return self._received or (self._stops and self.exchanger.workers.size == 1)

    def present(self) -> Tensor | None:
        """Return the mean of all current models."""
        return self._presented(1.0)

    def _presented(self, weight: float) -> Tensor | None:
        return self.exchanger.exchange(
            lambda means, number: means.whole.take(stop=False, weight=weight), aside=MODELS
        ).vector

    def end(self) -> None:
        """Leave the run's model in the flat vector, on all workers."""
        if self._sent is not None or self.exchanger.arrived is not None:
            self._adopt(self._terms.turn(self._done) if self._sent is None else self._sent[0], 0.0)
        for number in range(self._terms.fragments):
            if self._moved[number]:
                self._send(number, self._done)
                self._adopt(number, 0.0)

    @property
    def has_stopped(self) -> bool:
        return self._received

    def enter(self, state: State, step: int) -> None:
        """Start at the global model, from which all workers measure their changes."""
        super().enter(state, step)
        self._flat.vector.copy_(self._global)
        self._shares, self._counted = 0.0, 0

    def take_part(self, joins: int) -> None:
        if self._sent is not None and self.exchanger.arrived is None:
            number, step = self._sent
            nothing = self._flat.vector.new_zeros(numbers_of(self._fragments[number]))
            self._start(number, nothing, Step(step, 0.0))
        if joins == MODELS:
            self._presented(0.0)

    def initialize(self) -> None:
        self._global = self._flat.vector.clone()
        self._outer = SlicedOptimizer(self._outer_plan, self._global, self._places)

    def state(self) -> State:
        self.exchanger.arrive()
        return super().state()

    def load_state(self, state: State) -> None:
        super().load_state(state)
        if (arrived := self.exchanger.arrived) is not None:
            self.exchanger.arrived = arrived._replace(stop=False)  # a resumed run has not stopped

    def save_fields(self, fields: Sequence[StateField]) -> State:
        """Return the state of some fields, with the result that has arrived and is not applied yet."""
        (tensors, facts), arrived = super().save_fields(fields), self.exchanger.arrived
        if arrived is not None and arrived.vector is not None:
            tensors["movement"] = arrived.vector
        return tensors, facts | {"arrived": None if arrived is None else arrived.stop}

    def load_fields(self, fields: Sequence[StateField], state: State) -> None:
        super().load_fields(fields, state)
        tensors, facts = state
        if facts["arrived"] is not None:
            movement = tensors["movement"].clone() if "movement" in tensors else None
            self.exchanger.arrived = Result(movement, 1.0, facts["arrived"])

    def _send(self, number: int, step: int) -> None:
        """Start the mean of a fragment's change since its last mean."""
        fragment = self._fragments[number]
        movement = taken(self._global, fragment).sub_(taken(self._flat.vector, fragment))
        weight = self._shares / self._counted if self._counted else 1.0
        self._shares, self._counted = 0.0, 0
        self._sent = number, step
        self._start(number, movement, Step(step, weight, self._stops))

    def _start(self, number: int, movement: Tensor, step: Step) -> None:
        kept, sent = self.exchanger.sums.kept(number), False

        def run(means: FragmentMeans, entry: int) -> Callable[[], Result]:
            nonlocal sent
            before, sent = kept if sent else None, True
            return means.start(number, movement, step, before)

        self.exchanger.start(run)

    def _adopt(self, number: int, mixing: float) -> None:
        """Wait for the pending mean of a fragment, take its outer step, and mix the result into the local model."""
        movement, _, stops = self.exchanger.finish()
        self._sent = None
        self._received |= stops
        if movement is None:
            return
        fragment = self._fragments[number]
        parts = movement.split([place.stop - place.start for place in fragment])
        for place, part in zip(fragment, parts, strict=True):
            self._outer.step(self._numbers[place.start, place.stop], part, self._outer_rate)
        for place in fragment:
            own, common = self._flat.vector[place], self._global[place]
            if mixing:
                own.mul_(mixing).add_(common, alpha=1 - mixing)
            else:
                own.copy_(common)
        self._moved[number] = mixing > 0
