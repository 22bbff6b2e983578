"""Pipeline parallelism: a network cut into stages, one or more a worker, through which microbatches pass.

Huang, Cheng, Bapna and others, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, arXiv 1811.06965; Narayanan, Harlap, Phanishayee and others, "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019, arXiv 1806.03377.

    w' = w - lr sum_m n_m g_m / sum_m n_m      g_m the mean gradient of microbatch m of n_m images
    w(t+1) = w(t) - lr g(w(t-d))               without a flush (`weight_stashing`, `double_buffered`): see the schedule

K stages, R copies of each (`replicas=R`): worker s R + r holds copy r of stage s, and there are R pipelines
with images of their own. Or as many copies of each stage as are given (`replicas=[3, 1]`): there is one
pipeline; copy m mod r of a stage of r computes microbatch m, forward and backward (PipeDream's 1F1B-RR). The
workers of a pipeline see the same images: those of all their batches. The first stage takes the images, the
last one the labels; between them activations and their gradients are sent, a message for each microbatch and
value. Copies of a stage are combined by the strategy `inside`.

Each worker keeps parameters, gradients, state of the optimizer, activations and further versions of the
parameters, of its own stages only. The network is whole on rank 0 alone, from `settle`, at the end of every
epoch, to the next step: it tests and saves it, and has memory for all parameters in the meantime. Other
workers never have more of it than shapes. Images are read by the first stage, labels by all.

Batch normalization normalizes by microbatch, and changes its running statistics once a batch
(`partition/deferred_statistics.py`); with `normalize=batch` by all microbatches of a batch, for which stages that have
such layers wait. Dropout draws by step, microbatch and place in the network, wherever that is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.partition.chain import Chain
from polyrhythm.partition.deferred_statistics import DeferredStatistics
from polyrhythm.partition.outlook import (
    Pace,
    PipelineForecast,
    Work,
    best_copies,
    bytes_text,
    even_pace,
    fastest,
    measured_pieces,
    stage_times,
    step_of,
)
from polyrhythm.partition.parameter_transfer import WINDOW_BYTES, ParameterTransfer
from polyrhythm.partition.pipeline_pass import Lap, Pipelined, PipelinePass, SizedStage, StageWork, rows_of
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
from polyrhythm.partition.stage_memory import optimizer_bytes, rank_bytes, testing_bytes
from polyrhythm.specs import chosen
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.divided_network import ComputesStages, HasStages, PipelineContext, SharedBatch
from polyrhythm.strategies.resharding import Held, Resharding
from polyrhythm.strategies.state import State, below, prefixed
from polyrhythm.strategies.strategy import Facts, GroupOutput, Paper, Strategy, Traits
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters, View
from polyrhythm.training.memory import return_blocks
from polyrhythm.training.model_sizes import ModelSizes, PieceSize
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count
from polyrhythm.training.stage_parameters import StageParameters, WeightVersions, hold

INSIDE = ("polyrhythm.strategies.allreduce", "polyrhythm.strategies.averaging")
"""Families of the strategies that combine copies of a stage."""


class Pipeline(Strategy, HasStages):
    """Workers hold stages of one network, and microbatches pass through them.

    Attributes:
        stages: workers in a row, each with one stage, or more where the schedule interleaves; all, if not given.
        microbatches: number of parts of a step's images.
        schedule: order of forward and backward passes of the workers.
        cut: names of the layers behind which the network is cut; none: see `balance`.
        balance: cuts in other cases. `operations`: stages with equally many operations. `auto`: shortest
            step, by measured times of all layers, or in simulation by their operations and the cluster's
            links.
        recompute: whether activations are computed again for the backward pass, in place of being kept.
        normalize: images of batch normalization's statistics: a microbatch, or a whole batch of the pipeline.
        replicas: copies of each stage; of several numbers, of every stage its own. `auto`, with
            `balance=auto`: the numbers of stages and copies with the shortest step, at least two stages.
        inside: strategy that combines copies of a stage; it must be synchronous.
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
        use_it="networks or images that do not fit one device, and links too slow for whole gradients",
    )
    why_not_compressed: ClassVar[str] = (
        "its stages send activations, and errors in them cannot be corrected with the next batch: use "
        "synchronous"
    )
    former_keys: ClassVar[dict[str, str]] = {"normalise": "normalize"}

    stages: Count | None = None
    microbatches: Count = 4
    schedule: Annotated[Schedule, chosen("schedule", SCHEDULES)] = OneForwardOneBackward()
    cut: tuple[str, ...] = ()
    balance: Literal["operations", "auto"] = "operations"
    recompute: bool = False
    normalize: Literal["microbatch", "batch"] = "microbatch"
    replicas: Count | tuple[Count, ...] | Literal["auto"] = 1
    inside: Annotated[Strategy, chosen("inside strategy", *INSIDE)] = Synchronous()

    def ranks(self, workers: int) -> int:
        """Return how many workers are in a row: K."""
        if isinstance(self.replicas, tuple):
            return len(self.replicas)
        return self.stages or max(1, workers // self._even)

    def copies(self, workers: int) -> tuple[int, ...]:
        """Return the copies of every rank's stages."""
        return self.replicas if isinstance(self.replicas, tuple) else (self._even,) * self.ranks(workers)

    @property
    def most_copies(self) -> int:
        """Copies of the stage with the most."""
        return max(self.replicas) if isinstance(self.replicas, tuple) else self._even

    @property
    def _even(self) -> int:
        """Copies of each stage, where all have as many; one until they are chosen (`with_copies`)."""
        assert not isinstance(self.replicas, tuple)
        return 1 if self.replicas == "auto" else self.replicas

    @property
    def _deals(self) -> bool:
        """Whether microbatches are dealt out among the copies of a stage."""
        return self.replicas == "auto" or isinstance(self.replicas, tuple)

    def traits(self, workers: int) -> Traits:
        ranks = self.ranks(workers)
        updates = 1
        if not self.schedule.flushes:
            updates = self.microbatches // self.schedule.updates_every(self.microbatches)
        return Traits(
            local_models=workers > 1,
            updates=updates,
            gradients=updates,
            pipelines=1 if self._deals else max(1, workers // ranks),
        )

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        ranks, needed = self.ranks(workers), sum(self.copies(workers))
        if self.replicas == "auto":
            self._check_choosing(workers)
        elif isinstance(self.replicas, tuple):
            self._check_dealing(workers, needed)
        elif needed != workers:
            raise RequestError(
                f"{self} needs {ranks} times {self._even} workers (given {workers}): ask for "
                f"--workers {needed}, or for other stages and replicas"
            )
        self.schedule.check(ranks, self.microbatches)
        if self.normalize == "batch" and (self._deals or not self.schedule.forward_first):
            raise RequestError(
                f"{self}: statistics of a whole batch are known when all its forward passes are over, in one copy of a "
                "stage: use schedule=gpipe, and one number of replicas"
            )
        self.inside.check(self.most_copies)
        inside = self.inside.traits(self.most_copies)
        if inside.output is GroupOutput.NOTHING or not inside.lockstep or inside.waits_between_layers:
            raise RequestError(
                f"{self.name}(inside={self.inside}): copies of a stage must be synchronous, and wait between "
                "batches only: "
                "use synchronous, or a strategy with rounds, such as local_sgd"
            )
        if inside.output is GroupOutput.MODELS and not self.schedule.flushes:
            raise RequestError(
                f"{self.name}(inside={self.inside}): {self.schedule} updates with gradients that are late, which only "
                "copies that average gradients do alike: use inside=synchronous, or a schedule with a flush"
            )

    def _check_choosing(self, workers: int) -> None:
        """Refuse to choose copies where that is settled, or cannot be.

        Raises:
            RequestError: the number is fixed, or cannot be chosen.
        """
        if self.stages is not None or self.cut or self.balance != "auto":
            raise RequestError(
                f"{self}: replicas=auto chooses stages, cuts and copies by what a step takes: give balance=auto with "
                "it, and neither stages nor cut"
            )
        if workers < 2:
            raise RequestError(f"{self} shares workers out among stages: ask for --workers 2 at least")
        if not self.schedule.deals_out:
            raise RequestError(
                f"{self}: {self.schedule} does not deal microbatches out among different numbers of copies: use gpipe "
                "or one_forward_one_backward, or give replicas"
            )

    @property
    def cuts_again(self) -> bool:
        return self.balance == "auto" and not self.cut

    @property
    def chooses_copies(self) -> bool:
        return self.replicas == "auto"

    def has_become(self, other: Strategy) -> bool:
        return (
            isinstance(other, Pipeline)
            and self.chooses_copies
            and isinstance(other.replicas, tuple)
            and other.model_copy(update={"replicas": "auto"}) == self
        )

    def with_copies(
        self,
        make_model: Callable[[], nn.Module],
        image_shape: tuple[int, int, int],
        workers: int,
        images: int,
        pace_of: Callable[[Sequence[range]], Pace] | None = None,
        measured: Callable[[int], Sequence[float]] | None = None,
    ) -> Pipeline:
        if not self.chooses_copies:
            return self
        with torch.random.fork_rng(devices=[]):
            model = make_model()
        chain = Chain(model, next(model.parameters()).new_zeros(1, *image_shape))
        seconds = [] if measured is None else measured(max(1, images // self.microbatches))
        pieces = _timed(chain.pieces, seconds)
        check_stages(pieces, 2, str(self))

        def of(copies: tuple[int, ...]) -> Pipeline:
            return self.model_copy(update={"replicas": copies})

        def pace(copies: tuple[int, ...]) -> Pace:
            ranks = of(copies).workers_of_ranks(workers)
            return even_pace(len(copies)) if pace_of is None else pace_of(ranks)

        return of(best_copies(pieces, workers, lambda copies: of(copies).work(images, chain.dtype), pace))

    def _check_dealing(self, workers: int, needed: int) -> None:
        """Refuse different numbers of copies that cannot be.

        Raises:
            RequestError: these numbers are impossible.
        """
        assert isinstance(self.replicas, tuple)
        if not self.replicas or (self.stages is not None and self.stages != len(self.replicas)):
            raise RequestError(
                f"{self}: replicas has the copies of {len(self.replicas)} stages: give one number for each stage"
            )
        if needed != workers:
            raise RequestError(
                f"{self} needs {needed} workers, a copy each (given {workers}): ask for --workers {needed}, or for "
                "other replicas"
            )
        if not self.schedule.deals_out:
            raise RequestError(
                f"{self}: {self.schedule} does not deal microbatches out among different numbers of copies: use gpipe "
                "or one_forward_one_backward, or one number of replicas"
            )
        if self.microbatches < self.most_copies:
            raise RequestError(
                f"{self}: {self.microbatches} microbatches leave some of {self.most_copies} copies of a stage nothing "
                f"to do: ask for microbatches={self.most_copies} at least"
            )
        if self.inside.traits(self.most_copies).output is GroupOutput.MODELS:
            raise RequestError(
                f"{self}: copies that have different microbatches of a step must average gradients: use "
                "inside=synchronous"
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

    def outlook(
        self,
        chain: Chain,
        pieces: Sequence[PieceSize],
        workers: int,
        images: int,
        plan: OptimizerPlan,
        pace: Pace | None = None,
        bounds: Bounds | None = None,
    ) -> PipelineForecast:
        """Return the forecast of a run.

        Args:
            chain: the network.
            pieces: pieces of it; their operations may be measured seconds.
            workers: number of workers.
            images: images of a step, in one pipeline.
            plan: plan of the optimizer.
            pace: pace of the ranks; None: not known.
            bounds: bounds of the stages, where they differ from `bounds`.
        """
        ranks = self.ranks(workers)
        bounds = self.bounds(pieces, workers) if bounds is None else bounds
        stages = [chain.stage(*place) for place in pairwise(bounds)]
        # Stages that wait make one microbatch of a batch; that others do not is neglected.
        microbatches = 1 if self.waits(pieces) else self.microbatches
        work = replace(self.work(images, chain.dtype), microbatches=microbatches)
        times = stage_times(work, pieces, bounds, even_pace(ranks) if pace is None else pace)
        seconds, bubble = step_of(work, times, ranks)
        needs = optimizer_bytes(plan)
        memory = [
            rank_bytes(
                chain,
                stages,
                self.schedule,
                rank,
                ranks,
                microbatches,
                images,
                needs,
                recomputes=self.recompute,
                copies=work.copies,
            )
            for rank in range(ranks)
        ]
        if pace is not None and self.schedule.flushes:
            exchanged = [
                2 * (copies - 1) / copies * each.gradients / pace.bytes_per_s[rank]
                for rank, (copies, each) in enumerate(zip(self.copies(workers), memory, strict=True))
            ]
            seconds += max(exchanged)
        layers = tuple((pieces[start].name, pieces[stop - 1].name) for start, stop in pairwise(bounds))
        return PipelineForecast(layers, None if pace is None else seconds, bubble, tuple(memory))

    def waits(self, pieces: Sequence[PieceSize]) -> bool:
        """Return whether a stage of these pieces waits for all microbatches, and computes them at once."""
        return self.normalize == "batch" and self.microbatches > 1 and any(each.normalizes for each in pieces)

    def work(self, images: int, dtype: torch.dtype) -> Work:
        """Return the work of one pipeline for a step of `images` images."""
        dealt = self.replicas if isinstance(self.replicas, tuple) else ()
        return Work(self.schedule, self.microbatches, images, dtype.itemsize, self.recompute, dealt)

    def settled(
        self,
        model: nn.Module,
        image: Tensor,
        workers: int,
        images: int,
        plan: OptimizerPlan,
        pace: Pace,
        room: Sequence[float],
    ) -> tuple[Pipeline, PipelineForecast]:
        """Return the strategy with the network cut at given places, and what is to be expected of it.

        Args:
            model: the network.
            image: (1, C, H, W).
            workers: number of workers.
            images: images of a step, in one pipeline.
            plan: plan of the optimizer.
            pace: pace of the ranks.
            room: bytes that each rank has; infinite where not known.

        Raises:
            RequestError: it cannot be cut so, or a rank has not the memory for its stages.
        """
        chain, ranks = Chain(model, image), self.ranks(workers)
        pieces = chain.pieces
        found: dict[Bounds, PipelineForecast] = {}

        def foreseen(bounds: Bounds) -> PipelineForecast:
            if bounds not in found:
                found[bounds] = self.outlook(chain, pieces, workers, images, plan, pace, bounds)
            return found[bounds]

        def fits(bounds: Bounds) -> bool:
            return _lacking(foreseen(bounds), room) is None

        bounds, chooses = None, self.balance == "auto" and not self.cut
        if chooses:
            stages = ranks * self.schedule.chunks
            check_stages(pieces, stages, str(self))
            bounds = fastest(pieces, stages, self.work(images, chain.dtype), pace, fits)
        if bounds is None:
            bounds = self.bounds(pieces, workers)
        outlook = foreseen(bounds)
        self.check_room(outlook, room)
        if not chooses:
            return self, outlook
        return self.model_copy(update={"cut": tuple(pieces[stop - 1].name for stop in bounds[1:-1])}), outlook

    def workers_of_ranks(self, workers: int) -> tuple[range, ...]:
        firsts = [0, *accumulate(self.copies(workers))]
        return tuple(range(*pair) for pair in pairwise(firsts))

    def first_worker(self, rank: int) -> int:
        """Return the worker with the first copy of a rank's stages."""
        return sum(self.replicas[:rank]) if isinstance(self.replicas, tuple) else rank * self._even

    def check_room(self, outlook: PipelineForecast, room: Sequence[float]) -> None:
        """Refuse ranks that have less memory than their stages need.

        Raises:
            RequestError: a rank has too little memory; the message names the first.
        """
        rank = _lacking(outlook, room)
        if rank is None:
            return
        first = outlook.layers[rank][0].removesuffix("#1")
        last = outlook.layers[rank - len(outlook.ranks)][1]
        needs = outlook.ranks[rank]
        mends = "more stages or microbatches"
        if not self.recompute:
            mends += ", recompute=True"
        if needs.most > needs.training and rank == 0:
            mends = "a larger host for worker 0, which tests and saves the whole network"
        raise RequestError(
            f"worker {self.first_worker(rank)} needs {bytes_text(needs.most)} for its stage ({first} to {last}) and "
            f"has {bytes_text(int(room[rank]))}: ask for {mends}"
        )

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
        text = "all continue from worker 0's parameters, and stages are divided again with their optimizers' states"
        return Resharding(after=after, text=text, workers=lambda held, step: _joined(held, after))

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        assert self.replicas != "auto", "copies are chosen before workers are made"
        return PipelineWorker(setting, self)


def _timed(pieces: Sequence[PieceSize], seconds: Sequence[float]) -> Sequence[PieceSize]:
    """Return pieces with measured times in place of their operations, if there are any."""
    if not seconds:
        return pieces
    return [replace(piece, operations=time) for piece, time in zip(pieces, seconds, strict=True)]


def _lacking(outlook: PipelineForecast, room: Sequence[float]) -> int | None:
    """Return the first rank that has less memory than it needs, if there is one."""
    short = (
        rank for rank, (needs, has) in enumerate(zip(outlook.ranks, room, strict=True)) if needs.most > has
    )
    return next(short, None)


_AMPLE = 3
"""Ratio of memory to need above which a rank keeps freed memory: that is faster, and up to 2.3 times are resident."""
_WITHOUT_END = 1 << 62
"""Microbatches of a stream that ends when the pipeline is emptied."""


@dataclass(frozen=True)
class _Entered:
    """A batch that has entered the pipeline.

    Attributes:
        number: number of its step.
        weight: images of the batch, relative to a full batch.
        rows: images of each microbatch.
        slices: the microbatches' images.
        batch: None in a dry run.
    """

    number: int
    weight: float
    rows: tuple[int, ...]
    slices: tuple[slice, ...]
    batch: SharedBatch | None


class PipelineWorker(ComputesStages):
    """Computes its stages of every microbatch, and updates what is its own."""

    def __init__(self, setting: WorkerSetting, strategy: Pipeline) -> None:
        super().__init__()
        self._setting = setting
        self._strategy = strategy
        self._schedule, self._count = strategy.schedule, strategy.microbatches
        workers = setting.workers
        self._copies = strategy.copies(workers.size)
        self._dealt = self._copies if isinstance(strategy.replicas, tuple) else ()
        self._ranks = len(self._copies)
        self._firsts = [0, *accumulate(self._copies)]
        self._rank = bisect_right(self._firsts, workers.rank) - 1
        self._copy = workers.rank - self._firsts[self._rank]
        self._row = self._beside = workers
        if workers.size > 1:
            row = [first + self._copy for first in self._firsts[:-1]]
            self._row = workers.subgroup("pipeline", range(workers.size) if self._dealt else row)
            self._beside = workers.subgroup("copies", range(*self._firsts[self._rank : self._rank + 2]))
        self._pass: PipelinePass | None = None
        self._entered: dict[int, _Entered] = {}
        self._batches = self._through = 0
        self._stream: Iterator[Unit] | None = None
        self._ahead: Unit | None = None
        self._computed_with: dict[int, int] = {}
        self._whole, self._stop, self._own_share = True, False, 1.0
        self._statistics: list[DeferredStatistics] = []
        self._buffers: list[list[Tensor]] = []
        self._transfer = ParameterTransfer(
            workers.subgroup("network", range(workers.size)) if workers.size > 1 else workers
        )
        self.outlook: PipelineForecast | None = None

    def take_network(self, model: nn.Module, image: Tensor, around: PipelineContext) -> None:
        strategy, flat = self._strategy, self._setting.flat
        chain = Chain(model, image)
        check_stages(chain.pieces, self._ranks * self._schedule.chunks, str(strategy))
        pieces, bounds = self._pieces(chain, around)
        self.outlook = None
        if self._setting.workers.rank == 0 and around.images:
            self.outlook = self._foreseen(chain, pieces, bounds, model, around)
        hold(model, (), image.device)  # buffers, which all workers keep
        cut = [chain.stage(start, stop) for start, stop in pairwise(bounds)]
        views = {id(view.parameter): view for view in flat.views}
        owned: list[list[View]] = [[] for _ in range(self._ranks)]
        self._buffers = [[] for _ in range(self._ranks)]
        for number, stage in enumerate(cut):
            found = [views.pop(id(each), None) for each in stage.module.parameters()]
            owned[number % self._ranks] += [view for view in found if view is not None]
            self._buffers[number % self._ranks] += list(stage.module.buffers())
        owned[0] += views.values()  # parameters that no stage uses
        if flat.vector.is_meta:
            used = [each for stage in cut[self._rank :: self._ranks] for each in stage.module.parameters()]
            used += [view.parameter for view in owned[self._rank]]
            held = hold(model, used, image.device)
            owned[self._rank] = [
                replace(view, parameter=held[id(view.parameter)]) for view in owned[self._rank]
            ]
        self._adopt(StageParameters(flat, owned, self._rank, image.device))
        shares = share_of_stages(pieces, bounds)
        works: list[StageWork] = []
        for place in range(self._rank, len(cut), self._ranks):
            stage, share = chain.stage(bounds[place], bounds[place + 1]), shares[place]
            together = strategy.waits(pieces[bounds[place] : bounds[place + 1]])
            self._statistics.append(DeferredStatistics(stage.module, 1 if together else self._count))
            work = NetworkStage(chain, stage, share, self._microbatch, self._own.flat.vector)
            work.recomputes, work.splits = strategy.recompute, self._schedule.splits_backward
            work.together = together
            work.statistics, work.using = self._statistics[-1], self._with_version
            works.append(work)
        self._pass = PipelinePass(self._schedule, self._count, self._row, works, self._dealt)

    def _pieces(self, chain: Chain, around: PipelineContext) -> tuple[Sequence[PieceSize], Bounds]:
        """Return the pieces and the bounds of stages; of `balance=auto`, as worker 0 has measured them."""
        strategy, workers = self._strategy, self._setting.workers
        pieces: Sequence[PieceSize] = chain.pieces
        if strategy.cut or strategy.balance != "auto":
            return pieces, strategy.bounds(pieces, workers.size)
        seconds = torch.zeros(len(pieces), dtype=torch.float64)
        if workers.rank == 0 and around.now is not None:
            rows = max(1, around.images // self._count)
            seconds += torch.tensor(measured_pieces(chain, rows, around.now), dtype=torch.float64)
        if workers.size > 1:
            workers.broadcast(seconds)
        if float(seconds.sum()) > 0:
            pieces = _timed(pieces, seconds.tolist())
        work = strategy.work(max(1, around.images), chain.dtype)
        pace = even_pace(self._ranks, max(float(seconds.sum()), 1e-9) * self._count / self._row.size)
        bounds = fastest(pieces, self._ranks * self._schedule.chunks, work, pace)
        assert bounds is not None, "all fit"
        return pieces, bounds

    def _foreseen(
        self,
        chain: Chain,
        pieces: Sequence[PieceSize],
        bounds: Bounds,
        model: nn.Module,
        around: PipelineContext,
    ) -> PipelineForecast:
        strategy, setting = self._strategy, self._setting
        pace = None
        if pieces is not chain.pieces:
            whole_s = sum(piece.operations for piece in pieces) * self._count
            pace = even_pace(self._ranks, whole_s / self._row.size)
        outlook = strategy.outlook(
            chain, pieces, setting.workers.size, around.images, setting.plan, pace, bounds
        )
        needs, vector = outlook.ranks[0], setting.flat.nbytes
        if self._ranks > 1:
            testing = testing_bytes(model, chain.image_shape, min(around.images, around.tested))
            states = vector * needs.optimizer // max(1, needs.parameters) if around.saves else 0
            # Received parameters before they are put into place; at most a window from each rank.
            arriving = sum(min(2 * WINDOW_BYTES, each.parameters) for each in outlook.ranks[1:])
            copied = vector if around.saves or around.writes else 0
            largest = max(view.parameter.nbytes for view in setting.flat.views)
            needs = replace(
                needs, whole=vector + states + max(testing, arriving, copied), start=vector + largest
            )
            # States of others for a checkpoint: a copy of each state, packed, and as a message.
            others = [replace(each, whole=3 * each.optimizer * around.saves) for each in outlook.ranks[1:]]
            outlook = replace(outlook, ranks=(needs, *others))
        if around.room is not None:
            strategy.check_room(outlook, [around.room] * self._ranks)
            if _AMPLE * outlook.ranks[self._rank].most > around.room:
                return_blocks()
        return outlook

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
                work.together = self._strategy.waits(pieces[start:stop])
                works.append(work)
        self._adopt(
            StageParameters.of_sizes(setting.flat, numbers, self._rank), OptimizerPlan("SGD", (), 0.0)
        )
        self._buffers = [[] for _ in range(self._ranks)]
        self._pass = PipelinePass(self._schedule, self._count, self._row, works, self._dealt)

    @property
    def reads_images(self) -> bool:
        return self._rank == 0

    def start(self, step: int) -> int:
        """Take the parameters of the own stages from worker 0, which has the whole network."""
        if self._setting.workers.rank > 0:
            self._transfer.receive(0, self._own.own())
        else:
            self._own.take()
            ranks = [rank for rank, copies in enumerate(self._copies) for _ in range(copies)]
            self._transfer.hand_out([self._own.of_rank(rank) for rank in ranks])
        return self._inner.start(step)

    def compute_stages(self, step: Step, batch: SharedBatch) -> float:
        rows = rows_of(len(batch.images), self._count)
        ends = [0, *accumulate(rows)]
        slices = tuple(slice(*place) for place in pairwise(ends))
        entered = _Entered(step.number, len(batch.images) / batch.full, rows, slices, batch)
        first = step.number * self._count
        rate = batch.learning_rate
        return self._run(entered, Pipelined(rows, first, rate, batch.pass_time, batch.lap, step.stop))

    def compute_dry(
        self,
        step: Step,
        images: int,
        full: int,
        pass_time: Callable[[float, str], None],
        lap: Callable[[Lap, str], None],
    ) -> None:
        rows, first = rows_of(images, self._count), step.number * self._count
        entered = _Entered(step.number, images / full, rows, (), None)
        self._run(entered, Pipelined(rows, first, 0.0, pass_time, lap, step.stop))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if self._schedule.flushes:
            entered = self._entered.pop(0)
            if 0 < self._own_share < 1:  # weighted with the number of its own images
                self._own.flat.gradients.div_(self._own_share)
            stop = self._update(entered, entered.weight * self._own_share, learning_rate, self._stop)
            self.staleness[0] += entered.weight > 0
            return stop
        return self._stop

    def settle(self) -> None:
        """Empty the pipeline, and make the network whole on worker 0; all must do so at the same step."""
        self._drain()
        self._inner.settle()
        if not self._whole:
            self._gather()
        self._whole = True

    def end(self) -> None:
        self.settle()
        self._inner.end()
        if self._strategy.inside.traits(self._strategy.most_copies).output is GroupOutput.MODELS:
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
            ([slice(*piece) for piece in pieces], (below(f"{number}.", tensors), stated))
            for number, (pieces, stated) in enumerate(facts["stages"])
        ]
        self._inner.load_state(self._own.recut(states, self._setting.plan))

    def _adopt(self, own: StageParameters, plan: OptimizerPlan | None = None) -> None:
        """Train a part of the whole network's parameters."""
        plan = own.plan(self._setting.plan) if plan is None else plan
        inner = replace(self._setting, workers=self._beside, flat=own.flat, plan=plan)
        self._own = own
        self._versions = WeightVersions(own.flat)
        self._inner = self._strategy.inside.worker(inner)

    def _even_pieces(self) -> tuple[PieceSize, ...]:
        """Return as many even pieces as there are stages, for a model with known buckets only."""
        stages = self._ranks * self._schedule.chunks
        parameters = round(self._setting.flat.size * self._setting.flat.stands_for / stages)
        return (PieceSize("", parameters, 1.0, (0,), 0),) * (stages - 1) + (
            PieceSize("", parameters, 1.0, (), 0),
        )

    def _stand_in(self, number: int, numbers: int) -> Tensor:
        """Return a proxy of `numbers` numbers of each image of a microbatch, in a dry run."""
        assert self._pass is not None
        rows = self._pass.batches[number // self._count].rows[number % self._count]
        return self._setting.flat.vector.new_zeros(round(numbers * rows / self._setting.flat.stands_for))

    def _microbatch(self, number: int) -> Microbatch:
        entered, position = self._entered[number // self._count], number % self._count
        place, batch = entered.slices[position], entered.batch
        assert batch is not None, "a dry run has no images"
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
        assert self._pass is not None, "the network must be set before steps"
        if self._whole:
            self._own.release()
            self._whole = False
        self._entered[self._batches] = entered
        self._pass.batches[self._batches] = batch
        if self._schedule.flushes:
            for unit in self._units():
                self._pass.run(unit)
            self._pass.finish_sends()
            self._commit()
            self._stop = batch.stop
            self._own_share = sum(self._own_rows(batch.rows)) / max(1, batch.images)
            # Each of the first stage's copies receives the losses of its own microbatches.
            return batch.loss / self._own_share if self._own_share else 0.0
        self._batches += 1
        if self._stream is None:
            self._stream = self._schedule.units(self._rank, self._ranks, _WITHOUT_END)
            self._ahead = next(self._stream)
        assert self._ahead is not None
        while not (self._ahead.kind == "F" and self._ahead.microbatch >= self._batches * self._count):
            self._advance(self._ahead)
            self._ahead = next(self._stream)
        self._pass.finish_sends()
        # Known to the whole pipeline by now, and to no later batch: so all stop after the same step.
        known = self._pass.batches.get(self._batches - self._ranks)
        self._stop = known is not None and known.stop
        return 0.0 if known is None else known.loss

    def _units(self) -> Iterator[Unit]:
        """Yield this worker's units of a batch."""
        if self._dealt:
            return self._schedule.units_of_copy(self._dealt, self._rank, self._copy, self._count)
        return self._schedule.units(self._rank, self._ranks, self._count)

    def _own_rows(self, rows: Sequence[int]) -> Sequence[int]:
        """Return those of this worker's microbatches, where they are dealt out among copies; else all."""
        return rows[self._copy :: self._dealt[self._rank]] if self._dealt else rows

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
        """Let the backward passes end that are in progress where there is no flush."""
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
        """Complete the network on worker 0, from the first copy of each stage; buffers on all."""
        workers, copies = self._setting.workers, self._copies[self._rank]
        if workers.size == 1:
            return
        if workers.rank == 0:
            self._own.allocate()
            for rank in range(1, self._ranks):
                self._transfer.receive(self._firsts[rank], self._own.of_rank(rank))
        elif self._rank > 0 and self._copy == 0:
            for handle in self._transfer.send(0, self._own.own()):
                handle.wait()
        self._transfer.number += 1
        if copies > 1 and self._buffers:
            for buffer in self._buffers[self._rank]:
                if buffer.is_floating_point():
                    self._beside.all_reduce(buffer)
                    buffer.div_(copies)
        for rank, buffers in enumerate(self._buffers):
            for buffer in buffers:
                workers.broadcast(buffer, self._firsts[rank])


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
        tensors |= prefixed(f"{len(stages)}.", own)
        stages.append([facts["pieces"], facts["stage"]])
    return dict.fromkeys(range(workers), (tensors, {"stages": stages}))
