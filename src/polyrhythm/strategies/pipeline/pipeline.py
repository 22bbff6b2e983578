"""Pipeline parallelism: a network cut into stages, one or more a worker, through which microbatches pass.

Huang, Cheng, Bapna and others, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, arXiv 1811.06965; Narayanan, Harlap, Phanishayee and others, "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019, arXiv 1806.03377.

    w' = w - lr sum_m n_m g_m / sum_m n_m      g_m the mean gradient of microbatch m of n_m pictures
    w(t+1) = w(t) - lr g(w(t-d))               without a flush (`weight_stashing`, `double_buffered`): see the schedule

K stages, R copies of each (`replicas`): worker s R + r holds copy r of stage s. The workers of a pipeline see the same
pictures: those of all their batches. The first stage takes the pictures, the last one the labels; between them
activations and their gradients travel, a message for each microbatch and value. Copies of a stage go on with each other
by the strategy `inside`.

What each worker keeps: the parameters of the whole network, so that any of them can be tested and saved; gradients,
state of the optimiser, activations and further versions of the parameters of its own stages only. The network on a
worker is whole only after `settle`, which comes at the end of every epoch: until then it holds old values of other
stages.

Batch normalisation normalises by microbatch, and changes its running statistics once a batch
(`partition/deferred_statistics.py`). Dropout draws by step, microbatch and place in the network, wherever that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.partition.chain import Chain
from polyrhythm.partition.deferred_statistics import DeferredStatistics
from polyrhythm.partition.pipeline_pass import Pipelined, PipelinePass, SizedStage, StageWork, rows_of
from polyrhythm.partition.schedule import SCHEDULES, Schedule, Unit
from polyrhythm.partition.schedules.one_forward_one_backward import OneForwardOneBackward
from polyrhythm.partition.stage import (
    Bounds,
    Microbatch,
    NetworkStage,
    balanced,
    check_stages,
    given,
    share_of_stages,
)
from polyrhythm.specs import chosen
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.state import Held, Resharding, State, below
from polyrhythm.strategies.strategy import Facts, GroupOutput, HasStages, Paper, Strategy, Traits
from polyrhythm.strategies.worker_part import (
    ComputesStages,
    SharedBatch,
    Step,
    WorkerCalls,
    WorkerPart,
    WorkerSetting,
)
from polyrhythm.training.flat_parameters import FlatParameters, View
from polyrhythm.training.model_sizes import ModelSizes, PieceSize
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count
from polyrhythm.training.stage_parameters import StageParameters, WeightVersions

INSIDE = ("polyrhythm.strategies.allreduce", "polyrhythm.strategies.averaging")
"""The families of strategies that copies of a stage go on by."""


class Pipeline(Strategy, HasStages):
    """Workers hold stages of one network, and microbatches pass through them.

    Attributes:
        stages: workers in a row, each with one stage, or more where the schedule interleaves; all, if not given.
        microbatches: into which the pictures of a step are cut.
        schedule: in which order workers compute forward and backward passes.
        cut: names of the layers behind which the network is cut; none: where stages take equally long.
        recompute: whether activations are computed again for the backward pass, in place of being kept.
        replicas: copies of each stage.
        inside: how copies of a stage go on together; a strategy whose workers go in step.
    """

    paper: ClassVar[Paper] = Paper(
        "Huang, Cheng, Bapna and others",
        "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
        "NeurIPS",
        2019,
        "1811.06965",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2A(K-1)",
        staleness="0; K-1-k at stage k (weight_stashing), 1 (double_buffered)",
        use_it="networks or pictures that do not fit one device, and links too slow for whole gradients",
    )

    stages: Count | None = None
    microbatches: Count = 4
    schedule: Annotated[Schedule, chosen("schedule", SCHEDULES)] = OneForwardOneBackward()
    cut: tuple[str, ...] = ()
    recompute: bool = False
    replicas: Count = 1
    inside: Annotated[Strategy, chosen("inside strategy", *INSIDE)] = Synchronous()

    def ranks(self, workers: int) -> int:
        """Return how many workers are in a row: K."""
        return self.stages or max(1, workers // self.replicas)

    def traits(self, workers: int) -> Traits:
        ranks = self.ranks(workers)
        updates = 1
        if not self.schedule.flushes:
            updates = self.microbatches // self.schedule.updates_every(self.microbatches)
        return Traits(
            local_models=workers > 1,
            updates=updates,
            gradients=updates,
            plain_alone=False,
            cuts_network=True,
            pipelines=max(1, workers // ranks),
        )

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        ranks = self.ranks(workers)
        if ranks * self.replicas != workers:
            raise RequestError(
                f"{self} needs {ranks} times {self.replicas} workers (given {workers}): ask for "
                f"--workers {ranks * self.replicas}, or for other stages and replicas"
            )
        self.schedule.check(ranks, self.microbatches)
        self.inside.check(self.replicas)
        inside = self.inside.traits(self.replicas)
        if inside.output is GroupOutput.NOTHING or not inside.lockstep or inside.waits_between_layers:
            raise RequestError(
                f"{self.name}(inside={self.inside}): copies of a stage must go in step, and wait between batches only: "
                "use synchronous, or a strategy whose workers meet in rounds, such as local_sgd"
            )
        if self.inside.traits(self.replicas).output is GroupOutput.MODELS and not self.schedule.flushes:
            raise RequestError(
                f"{self.name}(inside={self.inside}): {self.schedule} updates with gradients that are late, which only "
                "copies that average gradients do alike: use inside=synchronous, or a schedule with a flush"
            )

    def bounds(self, pieces: Sequence[PieceSize], workers: int) -> Bounds:
        """Return the first piece of every stage, and how many there are.

        Raises:
            RequestError: it cannot be cut so.
        """
        stages = self.ranks(workers) * self.schedule.chunks
        check_stages(pieces, stages, str(self))
        if self.cut:
            return given(pieces, self.cut, stages, str(self))
        return balanced(pieces, stages)

    def check_network(self, model: nn.Module, flat: FlatParameters, image: Tensor, workers: int) -> None:
        self.bounds(Chain(model, image).pieces, workers)

    def sizes_of_parts(
        self, sizes: ModelSizes, model: nn.Module, image_shape: tuple[int, int, int], workers: int
    ) -> ModelSizes:
        like = next(model.parameters())
        pieces = Chain(model, like.new_zeros(1, *image_shape)).pieces
        self.bounds(pieces, workers)
        return replace(sizes, pieces=pieces)

    def resharding(self, before: int, after: int) -> Resharding:
        text = "all go on from worker 0's parameters, and stages are cut anew with their optimisers' states"
        return Resharding(after=after, text=text, workers=lambda held, step: _joined(held, after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return PipelineWorker(setting, self)


_WITHOUT_END = 1 << 62
"""Microbatches of a stream that ends when the pipeline is emptied."""


@dataclass(frozen=True)
class _Entered:
    """A batch that has entered the pipeline.

    Attributes:
        number: of its step.
        weight: its pictures, over those of a full batch.
        slices: the microbatches' pictures.
        batch: None in a dry run.
    """

    number: int
    weight: float
    slices: tuple[slice, ...]
    batch: SharedBatch | None


class PipelineWorker(WorkerPart, ComputesStages):
    """Computes its stages of every microbatch, and updates what is its own."""

    def __init__(self, setting: WorkerSetting, strategy: Pipeline) -> None:
        super().__init__()
        self._setting = setting
        self._strategy = strategy
        self._schedule, self._count = strategy.schedule, strategy.microbatches
        workers, copies = setting.workers, strategy.replicas
        self._ranks = strategy.ranks(workers.size)
        self._rank, copy = divmod(workers.rank, copies)
        self._row = self._beside = workers
        if workers.size > 1:
            self._row = workers.subgroup("pipeline", [rank * copies + copy for rank in range(self._ranks)])
            self._beside = workers.subgroup(
                "copies", [self._rank * copies + other for other in range(copies)]
            )
        self._pass: PipelinePass | None = None
        self._entered: dict[int, _Entered] = {}
        self._batches = self._through = 0
        self._stream: Iterator[Unit] | None = None
        self._ahead: Unit | None = None
        self._computed_with: dict[int, int] = {}
        self._whole, self._stop = True, False
        self._statistics: list[DeferredStatistics] = []
        self._buffers: list[list[Tensor]] = []
        self._own = StageParameters(setting.flat, [setting.flat.views])
        self._adopt(self._own)

    def take_network(self, model: nn.Module, image: Tensor) -> None:
        strategy, flat = self._strategy, self._setting.flat
        chain = Chain(model, image)
        bounds = strategy.bounds(chain.pieces, self._setting.workers.size)
        stages = [chain.stage(start, stop) for start, stop in pairwise(bounds)]
        views = {id(view.parameter): view for view in flat.views}
        owned: list[list[View]] = [[] for _ in range(self._ranks)]
        self._buffers = [[] for _ in range(self._ranks)]
        for number, stage in enumerate(stages):
            found = [views.pop(id(each), None) for each in stage.module.parameters()]
            owned[number % self._ranks] += [view for view in found if view is not None]
            self._buffers[number % self._ranks] += list(stage.module.buffers())
        owned[0] += views.values()  # what no stage uses
        self._adopt(StageParameters(flat, owned, self._rank))
        shares = share_of_stages(chain.pieces, bounds)
        works: list[StageWork] = []
        for stage, share in list(zip(stages, shares, strict=True))[self._rank :: self._ranks]:
            self._statistics.append(DeferredStatistics(stage.module, self._count))
            work = NetworkStage(chain, stage, share, self._microbatch, flat.vector)
            work.recomputes, work.splits = strategy.recompute, self._schedule.splits_backward
            work.statistics, work.using = self._statistics[-1], self._with_version
            works.append(work)
        self._pass = PipelinePass(self._schedule, self._count, self._row, works)

    def take_sizes(self, pieces: tuple[PieceSize, ...]) -> None:
        setting, pieces = self._setting, pieces or self._even_pieces()
        bounds = self._strategy.bounds(pieces, setting.workers.size)
        numbers = [0] * self._ranks
        works: list[StageWork] = []
        for stage, share in enumerate(share_of_stages(pieces, bounds)):
            start, stop = bounds[stage], bounds[stage + 1]
            numbers[stage % self._ranks] += sum(piece.parameters for piece in pieces[start:stop])
            if stage % self._ranks == self._rank:
                before = pieces[start - 1].outputs if start else ()
                work = SizedStage(share, before, pieces[stop - 1].outputs, self._stand_in)
                work.recomputes = self._strategy.recompute
                works.append(work)
        self._adopt(
            StageParameters.of_sizes(setting.flat, numbers, self._rank), OptimizerPlan("SGD", (), 0.0)
        )
        self._buffers = [[] for _ in range(self._ranks)]
        self._pass = PipelinePass(self._schedule, self._count, self._row, works)

    def start(self, step: int) -> int:
        self._setting.workers.broadcast(self._setting.flat.vector)
        self._own.take()
        return self._inner.start(step)

    def compute_stages(self, step: Step, batch: SharedBatch) -> float:
        rows = rows_of(len(batch.images), self._count)
        ends = [0, *accumulate(rows)]
        slices = tuple(slice(*place) for place in pairwise(ends))
        entered = _Entered(step.number, len(batch.images) / batch.full, slices, batch)
        first = step.number * self._count
        return self._run(entered, Pipelined(rows, first, batch.learning_rate, batch.pass_time, step.stop))

    def compute_dry(self, step: Step, images: int, full: int, pass_time: Callable[[float], None]) -> None:
        entered = _Entered(step.number, images / full, (), None)
        rows, first = rows_of(images, self._count), step.number * self._count
        self._run(entered, Pipelined(rows, first, 0.0, pass_time, step.stop))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._schedule.flushes:
            entered = self._entered.pop(0)
            stop = self._update(entered, entered.weight, learning_rate, self._stop)
            self.staleness[0] += entered.weight > 0
            return stop
        return self._stop

    def settle(self) -> None:
        """Empty the pipeline, and make the network whole on all workers, who must do so at the same step."""
        self._drain()
        self._inner.settle()
        if not self._whole:
            self._gather()
        self._whole = True

    def end(self) -> None:
        self.settle()
        self._inner.end()
        if self._strategy.inside.traits(self._strategy.replicas).output is GroupOutput.MODELS:
            self._gather()

    def state(self) -> State:
        tensors, facts = self._inner.state()
        return tensors, {"pieces": _ends(self._own.pieces[self._rank]), "stage": facts}

    def load_state(self, state: State) -> None:
        tensors, facts = state
        if "stages" not in facts:
            self._inner.load_state((tensors, facts["stage"]))
            return
        states = [
            ([slice(*piece) for piece in pieces], (below(f"{number}.", tensors), told))
            for number, (pieces, told) in enumerate(facts["stages"])
        ]
        self._inner.load_state(self._own.recut(states, self._setting.plan))

    def _adopt(self, own: StageParameters, plan: OptimizerPlan | None = None) -> None:
        """Train a part of the whole network's parameters."""
        plan = own.plan(self._setting.plan) if plan is None else plan
        inner = replace(self._setting, workers=self._beside, flat=own.flat, plan=plan)
        self._own = own
        self._versions = WeightVersions(own.flat)
        self._inner = WorkerCalls(self._strategy.inside.worker(inner))

    def _even_pieces(self) -> tuple[PieceSize, ...]:
        """Return as many even pieces as there are stages, for a model of which only its buckets are known."""
        stages = self._ranks * self._schedule.chunks
        parameters = round(self._setting.flat.size * self._setting.flat.stands_for / stages)
        return (PieceSize("", parameters, 1.0, (0,), 0),) * (stages - 1) + (
            PieceSize("", parameters, 1.0, (), 0),
        )

    def _stand_in(self, number: int, numbers: int) -> Tensor:
        """Return what stands for so many numbers of each picture of a microbatch, in a dry run."""
        assert self._pass is not None
        rows = self._pass.batches[number // self._count].rows[number % self._count]
        return self._setting.flat.vector.new_zeros(round(numbers * rows / self._setting.flat.stands_for))

    def _microbatch(self, number: int) -> Microbatch:
        entered, position = self._entered[number // self._count], number % self._count
        place, batch = entered.slices[position], entered.batch
        assert batch is not None, "a dry run has no pictures"
        rows = place.stop - place.start
        share = rows / max(1, len(batch.images))
        scale = 1.0 if self._schedule.updates_every(self._count) == 1 else share
        return Microbatch(
            batch.images[place],
            rows,
            lambda logits: batch.loss(logits, place),
            share,
            scale,
            lambda layer: batch.seed(position, layer),
            position,
        )

    def _run(self, entered: _Entered, batch: Pipelined) -> float:
        """Take a batch into the pipeline, and do what follows; return the mean loss of the latest that is known."""
        assert self._pass is not None, "the network comes before steps"
        self._whole = False
        self._entered[self._batches] = entered
        self._pass.batches[self._batches] = batch
        if self._schedule.flushes:
            for unit in self._schedule.units(self._rank, self._ranks, self._count):
                self._pass.run(unit)
            self._pass.finish_sends()
            self._commit()
            self._stop = batch.stop
            return batch.loss
        self._batches += 1
        if self._stream is None:
            self._stream = self._schedule.units(self._rank, self._ranks, _WITHOUT_END)
            self._ahead = next(self._stream)
        assert self._ahead is not None
        while not (self._ahead.kind == "F" and self._ahead.microbatch >= self._batches * self._count):
            self._advance(self._ahead)
            self._ahead = next(self._stream)
        self._pass.finish_sends()
        # What all of the pipeline know by now, and no later batch: so all stop after the same step.
        known = self._pass.batches.get(self._batches - self._ranks)
        self._stop = known is not None and known.stop
        return 0.0 if known is None else known.loss

    def _advance(self, unit: Unit) -> None:
        """Compute a unit where there is no flush, and update if an update is due."""
        assert self._pass is not None
        number, count = unit.microbatch, self._count
        if unit.kind == "F":
            self._computed_with[number] = self._schedule.version(number, self._rank, self._ranks, count)
            self._pass.run(unit)
            return
        self._pass.run(unit)
        self._through = number + 1
        version, every = self._computed_with.pop(number), self._schedule.updates_every(count)
        if self._through % every:
            return
        entered, batch = self._entered[number // count], self._pass.batches[number // count]
        rows = batch.rows[number % count] if every == 1 else batch.images
        weight = rows / max(1, max(batch.rows) if every == 1 else batch.images) * entered.weight
        following = self._schedule.version(
            max(self._computed_with, default=number) + 1, self._rank, self._ranks, count
        )
        oldest = min([following, *self._computed_with.values()])
        if oldest <= self._versions.newest:
            self._versions.keep()
        self.staleness[self._versions.newest - version] += rows > 0
        self._update(entered, weight, batch.learning_rate, False)
        self._versions.updated(oldest)
        for done in [each for each in self._entered if each < self._batches - 2 * self._ranks]:
            if (done + 1) * count <= self._through:
                del self._entered[done], self._pass.batches[done]

    def _update(self, entered: _Entered, weight: float, learning_rate: float, stop: bool) -> bool:
        """Update this worker's stages with the gradients of all their copies; return whether any wants to stop."""
        step = Step(entered.number, weight, stop)
        self._inner.begin(step)
        stops = self._inner.gradients_ready(step, learning_rate)
        self._own.flat.zero_gradients()
        return stops

    def _drain(self) -> None:
        """Let the backward passes end that are under way where there is no flush."""
        if self._stream is not None:
            assert self._pass is not None
            for number in range(self._through, self._batches * self._count):
                self._advance(Unit("B", number))
            self._pass.finish_sends()
            self._pass.batches.clear()
            self._entered.clear()
            self._versions.clear()
            self._batches = self._through = 0
            self._stream = self._ahead = None
        self._commit()

    def _with_version(self, number: int) -> AbstractContextManager[None]:
        if self._schedule.flushes:
            return nullcontext()
        late = self._rank + 1 < self._ranks
        return self._versions.at(self._computed_with[number], updated_before_backward=late)

    def _commit(self) -> None:
        for statistics in self._statistics:
            statistics.commit()

    def _gather(self) -> None:
        """Complete the network on all workers, from the first copy of each stage."""
        workers, vector, copies = self._setting.workers, self._setting.flat.vector, self._strategy.replicas
        self._own.give()
        if workers.size == 1:
            return
        for rank, pieces in enumerate(self._own.pieces):
            for piece in pieces:
                workers.broadcast(vector[piece], rank * copies)
        if copies > 1 and self._buffers:
            for buffer in self._buffers[self._rank]:
                if buffer.is_floating_point():
                    self._beside.all_reduce(buffer)
                    buffer.div_(copies)
        for rank, buffers in enumerate(self._buffers):
            for buffer in buffers:
                workers.broadcast(buffer, rank * copies)


def _ends(pieces: Sequence[slice]) -> list[list[int]]:
    return [[piece.start, piece.stop] for piece in pieces]


def _joined(held: Held, workers: int) -> dict[int, State]:
    """Return the states of all stages, once each, for every worker to take its own from."""
    tensors: dict[str, Tensor] = {}
    stages: list[list[Any]] = []
    for worker in sorted(held.workers):
        own, facts = held.workers[worker]
        if facts["pieces"] in [pieces for pieces, _ in stages]:  # another copy
            continue
        tensors |= {f"{len(stages)}.{name}": value for name, value in own.items()}
        stages.append([facts["pieces"], facts["stage"]])
    return dict.fromkeys(range(workers), (tensors, {"stages": stages}))
