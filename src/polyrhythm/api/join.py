"""Joining a run from a script with its own training loop: `join`, and the `Group` that it returns."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from polyrhythm.api.loop.coordination import Coordination, print_line
from polyrhythm.api.loop.distributable import check_distributable
from polyrhythm.api.loop.distributed_optimizer import DistributedOptimizer, LazyStart
from polyrhythm.api.loop.gradients import Mean
from polyrhythm.api.loop.joint_metrics import join_metrics
from polyrhythm.api.loop.loop_evaluation import Evaluate, LoopEvaluation
from polyrhythm.api.loop.loop_profile import LoopProfile
from polyrhythm.api.loop.loop_storage import (
    LoopStorage,
    newest_in,
    read_folder,
    with_ranks,
    write_folder,
)
from polyrhythm.api.loop.position import Kept
from polyrhythm.api.loop.run_state import resume, run_state, worker_state
from polyrhythm.api.loop.shard import BatchesOfShard, Drawing, Shard, StepWeight, shard_of
from polyrhythm.api.loop.store_board import LoopWatch, Posted, StoreBoard, left_key, where_all_are
from polyrhythm.api.loop.synchronized_norms import NormPeers, synchronize, synchronized_norms
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.config.assemble import strategy_from, warn_of
from polyrhythm.config.run_config import FORMER_ASSIGNMENTS
from polyrhythm.config.stages import Stages
from polyrhythm.data.balances.given import Given
from polyrhythm.errors import Dismissed, RequestError, RunError
from polyrhythm.launch.devices import use_threads
from polyrhythm.launch.patience import speaking_up
from polyrhythm.launch.process import ask_names_briefly, keep_freed_memory
from polyrhythm.launch.script import (
    DISMISSED_KEY,
    FAILED_KEY,
    NEXT_STAGE_KEY,
    begin_again,
    begin_again_at_exit,
    begins_again,
    check_stage,
    leader_returns,
    meet,
    stage_under_way,
    started_by_run,
)
from polyrhythm.launch.torchrun.started_rank import started_by_torchrun, threads_beside
from polyrhythm.roles.balance import balances
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.worker_state import WorkerState
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.server import serve
from polyrhythm.roles.trainer import LoopSteps
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.flat_optimizer import make_optimizers_quickly
from polyrhythm.training.forward_pass import channels_innermost

if TYPE_CHECKING:
    from polyrhythm.api.loop.loop_report import LoopLog, LoopMeter
    from polyrhythm.reporting.event_log import Observer


def join(
    strategy: str | Strategy = "synchronous",
    *,
    threads: int | None = None,
    report: str | Path | None = None,
    observers: Sequence[Observer] = (),
) -> Group:
    """Join the run to which this process belongs.

        with polyrhythm.join("parameter_server(servers=2)") as group:
            model, optimizer = group.distribute(model, optimizer)
            for x, y in group.shard(loader):
                criterion(model(x), y).backward()
                optimizer.step(); optimizer.zero_grad()

    Started by `polyrhythm run --workers 2 script.py`, by `torchrun --nproc-per-node 4 script.py` (two of the four then
    serve), or by `python script.py`, which is a run of one worker. In a process that is a server this call serves
    until all workers have left, and then ends the process.

    Args:
        strategy: a spec, or a strategy; the same in all processes. `stages("synchronous until 0.1; easgd")`, under
            `polyrhythm run`: at the end of a stage's epochs (`Group.epochs`) every process exits, and the script is
            started again with the next strategy; its `epochs` continues with model, optimizer, schedules and counts.
        threads: compute threads of this worker; None: a share of the host's cores; a single worker keeps its setting.
        report: folder for the files that `train` writes to its run folder: events, phases of each step, TensorBoard
            files and, at the end, `report.html`. Losses and test results are those that the loop passes to `Group.log`.
        observers: receivers of every event, in the coordinator's process.

    Returns:
        The group of this worker, to be used in a `with`.

    Raises:
        RequestError: no such strategy, too few processes for it, or another one than rank 0's; or the report's folder
            is in use for something else.
        RunError: the other processes cannot be reached.
    """
    if observers and report is None:
        raise RequestError("observers receive the events of a report: give join a folder for it, report=…")
    if threads is not None and threads < 1:
        raise RequestError(f"threads must be at least 1 (given {threads})")
    profile = LoopProfile.requested()
    if profile is not None:
        strategy, report, observers = "synchronous", None, ()
    stage = None if isinstance(strategy, Strategy) else stage_of(str(strategy))
    spec = strategy if stage is None else stage.strategy
    chosen = (spec if isinstance(spec, Strategy) else strategy_from(spec)).in_own_loop()
    ask_names_briefly()
    rendezvous, roles = meet(chosen)
    if started_by_torchrun() and not started_by_run():
        # torchrun leaves every rank one thread; `polyrhythm run` has shared the cores out already.
        shared = threads_beside(rendezvous, range(rendezvous.size), roles, chosen)
        threads = threads or shared
    home, network = connect(rendezvous)
    world = World(
        network,
        roles,
        generation=rendezvous.generation,
        activity=home.activity,
        refused=home.refused,
        leader_returns=leader_returns(),
    )
    if not world.is_worker:
        _serve(chosen, world, home, stage)
    if threads is not None:
        use_threads(threads)
    keep_freed_memory()
    if report is None:
        return Group(chosen, world, home, stage=stage, profile=profile)
    return reported_group(chosen, world, home, Path(report), observers, stage)


@dataclass(frozen=True)
class LoopStage:
    """Current stage of a loop with several strategies.

    Attributes:
        stages: stages of the run.
        number: number of this stage, from 0.
        folder: folder of the run's state between stages; None where only worker 0 has it, or there is none yet.
        anew: whether processes restart themselves: those of torchrun, as its hosts need not share a folder.
    """

    stages: Stages
    number: int
    folder: Path | None
    anew: bool = False

    @property
    def strategy(self) -> str:
        """Spec of the strategy of this stage."""
        return self.stages.stages[self.number].strategy

    def end(self, epochs: int) -> int | None:
        """Return how many epochs of a loop are done at the end of this stage; None: it is the last.

        Raises:
            RequestError: a stage would have no epoch.
        """
        last = self.number == len(self.stages.stages) - 1
        return None if last else self.stages.ends(epochs)[self.number]

    def following(self, folder: Path | None) -> str:
        """Return `STAGE_VARIABLE` for a process that starts the next stage; `folder` holds the run's state."""
        return f"{self.number + 1}:{'' if folder is None else folder}"


def stage_of(spec: str) -> LoopStage | None:
    """Return the stage for which this process was started; None: the spec is that of one strategy.

    Raises:
        RequestError: stages are not possible here, or not with these strategies and targets.
    """
    stages = Stages.parse(spec)
    if stages is None:
        return None
    at = stage_under_way()
    if at is None:
        raise RequestError(
            "stages restart the script in every process, with polyrhythm run or torchrun: start with one "
            "of them, or train with the first strategy, group.save, and join with the next, group.load"
        )
    for each in stages.stages:  # what is impossible is refused before anything is trained
        check_stage(strategy_from(each.strategy).in_own_loop())
        if each.target is not None:
            raise RequestError(
                f"{each.strategy} until {each.target.metric}={each.target.value:g}: in a loop of your own a stage ends "
                "after epochs: write until 0.1, or until 3 epochs"
            )
    return LoopStage(stages, *at, anew=begins_again())


def refuse_stages(strategy: str | Strategy, trainer: str) -> None:
    """Refuse stages of strategies where another trainer counts the epochs.

    Args:
        strategy: see `join`.
        trainer: name of that trainer, for the error message.

    Raises:
        RequestError: `strategy` has several stages.
    """
    if Stages.parse(str(strategy)) is not None:
        raise RequestError(
            f"stages change at the end of epochs that group.epochs counts, and {trainer} counts its own: give one "
            f"strategy (given {strategy})"
        )


def reported_group(
    strategy: Strategy,
    world: World,
    home: Rank,
    folder: Path,
    observers: Sequence[Observer] = (),
    stage: LoopStage | None = None,
) -> Group:
    """Return a worker's group with a measured loop.

    Args:
        strategy: see `Group`.
        world: see `Group`.
        home: see `Group`.
        folder: folder for the report.
        observers: receivers of every event, on the coordinator.
        stage: see `Group`.
    """
    from polyrhythm.api.loop.loop_report import LoopLog, LoopMeter  # TensorBoard and pages take their time

    meter = LoopMeter()
    log = LoopLog(folder, observers, succeeds=world.rejoins) if world.leads else None
    return Group(strategy, meter.in_world(world), home, meter, log, stage)


def _serve(strategy: Strategy, world: World, home: Rank, stage: LoopStage | None) -> NoReturn:
    """Serve, then end the process or begin the next stage: a server does not run the rest of the script."""
    status = 0
    try:
        use_threads(1)
        make_optimizers_quickly()  # this process runs no code of the user's that could be compiled
        serve(strategy, world)
        follows = stage is not None and stage.anew and home.rendezvous.store.check([NEXT_STAGE_KEY])
        home.close()
        if stage is not None and follows:
            begin_again(stage.following(None))
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # A `with` cannot skip its body, and SystemExit would run the script's own `except` and `finally` blocks, which
    # expect a training run that this process has not done.
    os._exit(status)


_Model = TypeVar("_Model", bound=nn.Module)


class Group:
    """This worker's membership in a run; made by `join`, used in a `with`.

    At the end of the `with` all workers hold the run's final model. If its body raises, this worker leaves without
    notice and the error propagates; once its process has ended, others that wait for it get `RunError`. If a worker is
    killed and the strategy can continue without it, the others continue, and divide the next epoch among themselves.

    Args:
        strategy: strategy of the run.
        world: context of this rank.
        home: connections of this rank.
        meter: meter of this worker's loop; None without a report.
        log: writer of the report, on the coordinator.
        stage: present stage, where the run has several.
        profile: measurement that ends this process; None: an ordinary run.

    Attributes:
        rank: index of this worker; it does not change when others fail.
        leads: whether this worker prints and saves: rank 0, whether the first process or its replacement.
        staleness: number of gradients applied at each staleness; available after the `with`, on the coordinator.
    """

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        home: Rank,
        meter: LoopMeter | None = None,
        log: LoopLog | None = None,
        stage: LoopStage | None = None,
        profile: LoopProfile | None = None,
    ) -> None:
        self._meter = meter
        self._profile = profile
        self._stage = stage
        self.rank = world.roles.workers.index(world.network.rank)
        self.leads = world.leads
        self.staleness: Counter[int] = Counter()
        self._strategy = strategy
        self._world = world
        self._home = home
        self._weight = StepWeight()
        self._coordination = Coordination(strategy, world, home, meter, log)
        self._replica: Replica | None = None
        self._optimizer: DistributedOptimizer | None = None
        self._joins: Counter[str] = Counter()
        self._watch: LoopWatch | None = None
        self._unsynchronize: Callable[[], None] | None = None
        self._part_metrics: list[Callable[[], None]] = []
        self._checkpoints: tuple[Path, str, int] | None = None
        self._resumed = ""

    @property
    def workers(self) -> int:
        """Number of workers that share the current or last epoch; before the first, the number that were started."""
        return self._coordination.workers

    def distribute(
        self,
        model: _Model,
        optimizer: torch.optim.Optimizer,
        *,
        digest_every: int = 0,
        channels_last: bool = False,
    ) -> tuple[_Model, DistributedOptimizer]:
        """Distribute a model and its optimizer over the workers.

        All workers receive worker 0's parameters when the model is first used in training; weights loaded before that
        count.

        Args:
            model: model on its final device; changed in place: its parameters become views of one vector.
            optimizer: optimizer of the model's parameters, which it must treat elementwise, as SGD and Adam do.
            digest_every: number of steps between two comparisons of the workers' parameters and optimizer states, where
                they must be equal bit for bit: a worker that differs receives the state of the others, and of two
                workers both return to the latest state that agreed. 0: none.
            channels_last: whether the model holds its images `(B, C, H, W)` with the channels innermost in memory, also
                those of one channel: faster convolutions, with other rounding. Layers must use `reshape` for `view`.

        Returns:
            The same model, and the optimizer to use from now on.

        Raises:
            RequestError: model or optimizer cannot be distributed, or this group has distributed one already.
        """
        if self._replica is not None:
            raise RequestError("a group distributes one model: put several into one nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RequestError(
                f"a group distributes one optimizer (given {type(optimizer).__name__}): give it param groups for what "
                "differs"
            )
        if digest_every < 0:
            raise RequestError(f"digest_every is a number of steps, or 0 (given {digest_every})")
        check_distributable(model, optimizer)
        if self._strategy.traits(self.workers).cuts_network:
            raise RequestError(
                f"{self._strategy} computes forward and backward passes itself, which a loop of your own does: use "
                "polyrhythm.train, or join with synchronous"
            )
        replica = Replica(model, optimizer, self._strategy, self._world, announce=False, own_loop=True)
        self._replica = replica
        if channels_last:
            model.register_forward_pre_hook(_channels_last)
        self._home.computes_on(replica.flat.vector.device)
        coordination = self._coordination
        trainer = coordination.take(replica, digest_every)
        steps = LoopSteps(trainer)
        traits = self._strategy.traits(self.workers)
        replica.run_hook = steps.guard
        mean = self._mean_of(replica)

        def begin(step: int) -> int:
            coordination.check_device(replica.flat.vector.device.type)
            return coordination.entry.begin(trainer, step)

        made = DistributedOptimizer(
            optimizer,
            steps,
            LazyStart(replica, begin),
            self._weight,
            mean,
            str(self._strategy),
            coordination.server_states,
            identical=traits.identical and traits.exchange_every == 1,
            meets=traits.lockstep and mean is Mean.OWN,
            all_take_part=traits.lockstep and traits.identical and traits.exchange_every == 1,
        )
        if self.leads:
            warn_of(self._strategy, self.workers, float(optimizer.param_groups[0]["lr"]))
        coordination.reform = coordination.entry.reform = made.regroup
        made.exchange_begins = coordination.step_begins
        coordination.means.place = lambda: made.place
        made.gather, made.on_growth = self.gather, coordination.report_admission
        many = len(self._world.roles.workers)
        made.where_all_are = partial(where_all_are, coordination.board, self.rank, many)
        store = self._home.rendezvous.store.clone()  # the watch has its own thread
        self._watch = LoopWatch(
            StoreBoard(store, lambda: None), self.rank, many, self._steps, coordination.report_waiting
        )
        made.waiting = self._watch.waiting
        if (meter := self._meter) is not None:
            meter.device = replica.flat.vector.device
            made.waiting = partial(meter.waiting, self._watch.waiting)
            made.gradients.pass_over = partial(meter.lap, "backward")
            model.register_forward_hook(lambda *_: meter.lap("forward") if model.training else None)
        made.register_step_pre_hook(lambda *_: coordination.step_begins())
        made.register_step_post_hook(lambda *_: coordination.step_done())
        self._optimizer = coordination.loop_progress.optimizer = made
        if many > 1 and synchronized_norms(model):
            self._synchronize_norms(model, made, mean)
        self.joint_metric(model)
        if self._profile is not None:
            self._profile.watch(model, made)
        return model, made

    def _synchronize_norms(self, model: nn.Module, optimizer: DistributedOptimizer, mean: Mean) -> None:
        if mean is Mean.OWN:
            if self.leads:
                print_line(
                    f"nn.SyncBatchNorm: with {self._strategy} each worker takes the statistics of its own batches, "
                    "since workers hold different models"
                )
            return
        workers = self._world.network.subgroup("synchronized norms", self._world.roles.workers)
        peers = NormPeers(workers, lambda: self._weight.now, lambda: optimizer.waiting(None))
        self._unsynchronize = synchronize(model, peers)

    def accumulate(self) -> AbstractContextManager[None]:
        """Add gradients up without an exchange, as torch's `no_sync`: for all backward passes of a step but the last.

            with group.accumulate():
                criterion(model(x), y).backward()
            criterion(model(u), v).backward()      # averages the sum of both
            optimizer.step()

        Without it the result is the same, with one exchange a pass. Strategies that exchange in `step` ignore it.
        """
        return self._optimized().gradients.accumulate()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allow a loop to end sooner on some workers than on others, as torch's `Join`; all workers must use it.

            with group.join():
                for x, y in my_own_batches:          # as many as this worker has
                    criterion(model(x), y).backward()
                    optimizer.step()

        Workers that have finished contribute nothing to the exchanges of the others, so means are over the workers
        that still have batches. In the end all have the parameters and the optimizer's state of a worker that has taken
        the most steps. Asynchronous strategies need no `join`. Step schedules by epochs, not by batches of unequal
        number. Where gradients are averaged on demand (`mean_gradients`), take one backward pass a step. With several
        of them, the failure of a worker during the loop ends the run.
        """
        optimizer = self._optimized()
        if self._unsynchronize is not None:
            raise RequestError(
                "group.join does not support nn.SyncBatchNorm, which needs all workers in each pass: use "
                "nn.BatchNorm, or "
                "give all workers as many batches (group.shard)"
            )
        epoch = self._coordination.epoch_under_way  # a replacement begins in the middle of the script
        loop = f"{epoch}/{self._joins[epoch]}"
        self._joins[epoch] += 1
        traits = self._strategy.traits(self.workers)
        if traits.lockstep:
            optimizer.begin_uneven()
        yield
        if traits.lockstep and traits.exchange_every and self.workers > 1:
            optimizer.take_part_until(self._coordination.ends, loop, traits.exchange_every)
        optimizer.uneven = False

    def mean_gradients(self) -> bool:
        """Overwrite the gradients with the workers' mean, if the strategy's workers have the same parameters.

        All workers must call it. It does nothing where they hold the mean after each backward pass.

        Returns:
            Whether the gradients are the mean now; False where each worker trains with its own.
        """
        optimizer = self._optimized()
        optimizer.mean_gradients()
        return optimizer.gradients.averaged

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
        """Clip the norm of the workers' mean gradient, as `torch.nn.utils.clip_grad_norm_` does in a single process.

        Where each worker trains with its own gradient (`mean_gradients`), that is clipped.

        Args:
            max_norm: largest norm.
            norm_type: the p of the norm.
            **options: further options of torch's function.

        Returns:
            The norm before clipping.
        """
        self.mean_gradients()
        return nn.utils.clip_grad_norm_(self._trained(), max_norm, norm_type, **options)

    def clip_grad_value_(self, clip_value: float, **options: Any) -> None:
        """Clip the values of the workers' mean gradient, as `torch.nn.utils.clip_grad_value_` does."""
        self.mean_gradients()
        nn.utils.clip_grad_value_(self._trained(), clip_value, **options)

    def _trained(self) -> list[nn.Parameter]:
        return [each for group in self._optimized().param_groups for each in group["params"]]

    def _optimized(self) -> DistributedOptimizer:
        if self._optimizer is None:
            raise RequestError("there are no gradients yet: call group.distribute before")
        return self._optimizer

    def _mean_of(self, replica: Replica) -> Mean:
        if replica.part.holds_mean:
            return Mean.STEP
        traits = self._strategy.traits(self.workers)
        if self._world.rejoins:  # the others continue without these means
            return Mean.OWN
        return Mean.ASKED if traits.identical and traits.exchange_every == 1 else Mean.OWN

    def epochs(self, count: int, *kept: Kept) -> Iterator[int]:
        """Yield the epochs that this worker takes part in: all of them, unless it is a replacement.

            for epoch in group.epochs(20, scheduler):
                for x, y in shard:
                    …

        With `range(count)` a replacement would begin at 0; so without this method failed workers are not replaced.

        Args:
            count: number of epochs.
            *kept: objects with state that a replacement needs from the others: learning-rate schedulers, and
                anything else with a `state_dict` of numbers and texts and a `load_state_dict`.

        Raises:
            RequestError: there is no optimizer yet, or the run is over.
        """
        optimizer = self._optimizer
        if optimizer is None or optimizer.over:
            raise RequestError(
                "call group.epochs after group.distribute, inside the `with` of polyrhythm.join"
            )
        stage, last = self._stage, count
        if stage is not None:
            if stage.number and not optimizer.has_begun:
                self._take_over(stage)
            last = stage.end(count) or count
        self._coordination.epoch_count = self._coordination.epoch_count or count
        self._coordination.loop_progress.keep(kept)
        self._coordination.report_admission()
        for epoch in self._coordination.epochs.through(last, optimizer.start):
            self._coordination.report_unseen()
            yield epoch
        if stage is not None and last < count:
            self._end_stage(stage)

    def _take_over(self, stage: LoopStage) -> None:
        """Continue from the end of the previous stage."""
        number = str(stage.number)
        if not stage.anew:
            assert stage.folder is not None, "restarted processes have a folder"
            self.load(stage.folder / number)
            return
        written = io.BytesIO()
        if stage.folder is not None:
            torch.save(read_folder(stage.folder / number), written)
            shutil.rmtree(stage.folder, ignore_errors=True)
        packed = self._from_leader(written.getvalue())
        self.load_state_dict(torch.load(io.BytesIO(packed), weights_only=True))

    def _from_leader(self, content: bytes) -> bytes:
        """Return worker 0's `content`; all workers call it."""
        workers = self._world.network.subgroup("stage", self._world.roles.workers)
        size = torch.tensor([len(content)])
        workers.broadcast(size)
        received = torch.empty(int(size), dtype=torch.uint8)
        received.numpy()[: len(content)] = memoryview(content)
        workers.broadcast(received)
        return received.numpy().tobytes()

    def _end_stage(self, stage: LoopStage) -> NoReturn:
        """Save the state for the next stage, and end this process in good order."""
        following, folder = str(stage.number + 1), stage.folder
        if stage.anew:
            folder = Path(tempfile.mkdtemp(prefix="polyrhythm-stages-")) if self.leads else None
        self.save((folder or Path()) / following)  # other workers than the coordinator write nothing
        if self.leads:
            self._home.rendezvous.store.set(NEXT_STAGE_KEY, following)
        self._finish()
        if stage.anew:
            begin_again_at_exit(stage.following(folder))
        raise SystemExit(0)

    def shard(
        self,
        loader: Iterable[Any],
        batches: BatchesOfShard = "static",
        weights: Sequence[float] = (),
        *,
        deal: str | None = None,
    ) -> Shard:
        """Return this worker's share of a loader; all workers must call it at the same place of their programs.

        - A `DataLoader` over a map-style data set: its batch size is that of one worker. Every step deals
          N x batch_size images of the sampler's order out among the N workers, so workers' images are disjoint and
          cover everything. A sampler that shuffles does so again each epoch, the same on all; one of your own must
          draw from a global generator of torch, Python or NumPy, or from one that is seeded alike. An order that
          differs between workers is an error. If the last step has fewer images than workers, some workers repeat an
          image of another worker, with a gradient that does not count; inside of `torch.no_grad()` they do not.
        - A `DataLoader` with a batch sampler, or over an `IterableDataset`, or any other iterable, the same on all
          workers; each takes every N-th batch. If the last round has fewer batches than workers, the others repeat the
          last batch, as above.

        After the failure of a worker in an epoch of `epochs`, the others divide its images, in as many steps. From the
        next epoch on N is smaller, and an epoch has more steps, unless a replacement has joined.

        With `batches="dynamic"`, for asynchronous strategies, each free worker gets the loader's next batch, so
        that a fast worker takes more of an epoch than a slow one; each image is in one batch of one worker. The loop
        then runs a different number of times on each: step schedules by epochs, call `group.average` outside of it.
        `len` of the shard is the workers' mean. Loading processes take their batches ahead, so keep their
        `prefetch_factor` small. A replacement takes the batches that the failed worker had been assigned.

        With `weights=[3, 1]`, for synchronous strategies, a worker's share of every step is
        in proportion to its weight, such as its speed; steps have as many images as without. Gradients count for their
        images. While a worker is absent the others' shares are equal.

        Args:
            loader: loader with the same batches on all workers.
            batches: `static` (each worker has its own share) or `dynamic`.
            weights: one per worker, above 0, the same on all; empty: equal shares.
            deal: former name of `batches`, with the values `fixed` and `drawn`, until 0.2.0.

        Raises:
            RequestError: `batches` is `dynamic` for a synchronous strategy or without a map-style
                loader; or the number of weights differs from that of workers, or the strategy cannot have weights.
        """
        board, number = self._coordination.board, self._coordination.loop_progress.next_shard
        workers = len(self._world.roles.workers)
        posted, drawing = Posted(board, f"script/shard/{number}", self.rank, workers), None
        given = batches if deal is None else deal
        assignment = FORMER_ASSIGNMENTS.get(given, given)
        if assignment not in get_args(BatchesOfShard):
            raise RequestError(f"shard: batches={given!r} is not known: give 'static' or 'dynamic'")
        if assignment == "dynamic" and workers > 1:
            self._check_draws()
            drawing = Drawing(board, f"script/drawn/{number}", self.rank)
        if weights and workers > 1:
            self._check_weights(tuple(map(float, weights)), loader, workers)
        made = shard_of(loader, posted, self._weight, self._coordination, number, drawing, weights)
        self._coordination.loop_progress.add(made)
        return made

    def state_dict(self, *kept: Kept) -> dict[str, Any]:
        """Return the state of the whole run: a run that loads it continues exactly where this one was.

            state = group.state_dict(scheduler)              # all workers, at the same place
            if group.leads:
                torch.save(state, "run.pt")

        It holds the model (`state["model"]`, with torch's names), each worker's part of the strategy, its buffers,
        random generators and places in its shards, the servers' shards, optimizers and clocks, and the epoch. All
        workers call it between two steps, and it returns when all have. After the last batch of an epoch the epoch
        counts as over, so call it last there.

        Args:
            *kept: objects with state that belongs to the run and that `group.epochs` was not given: schedulers,
                scalers, averages of the weights. Their numbers, texts and tensors are saved.

        Returns:
            Tensors, numbers and texts in dicts and lists, on the coordinator (`group.leads`); elsewhere an empty
            dict.

        Raises:
            RequestError: nothing was distributed, or a step is unfinished and has gradients.
        """
        self._optimized().start()
        held = self._coordination.collect(self._own_state())
        return {} if held is None else with_ranks(self._run_state(kept), *held)

    def _own_state(self) -> WorkerState:
        """Return the state of this worker, between two steps."""
        optimizer, coordination = self._optimized(), self._coordination
        assert self._replica is not None, "an optimizer is distributed with its model"
        optimizer.settle()
        return worker_state(
            self._replica, optimizer, coordination.loop_progress, counts_epochs=coordination.counts_epochs
        )

    def _run_state(self, kept: Sequence[Kept]) -> dict[str, Any]:
        """Return the state of the run without those of its workers and servers."""
        assert self._replica is not None, "an optimizer is distributed with its model"
        workers, optimizer = len(self._world.roles.workers), self._optimized()
        return run_state(self._strategy, self._replica.model, optimizer, self._coordination, workers, kept)

    def checkpoint(self, folder: str | Path, every: str, *kept: Kept, keep: int = 2) -> None:
        """Write a checkpoint if one is due; all workers call it between two steps, as at the end of each iteration.

            resumed = group.resume("checkpoints", scheduler)
            for epoch in group.epochs(10):
                for x, y in shard:
                    …
                    optimizer.step(); scheduler.step()
                    group.checkpoint("checkpoints", "100steps", scheduler)

        A step pays for one copy of this worker's state. The coordinator collects the states of all workers and writes
        them while steps continue; see `save` for the format. A full or slow disk delays checkpoints, never steps. At
        the end of the `with` the newest one is whole.

        Args:
            folder: folder of the checkpoints.
            every: interval: `100steps`, `10min` (`s`, `h`) or `1epoch` of `epochs`. With local steps there is at most
                one checkpoint in a round.
            *kept: see `state_dict`.
            keep: number of newest checkpoints to keep.

        Raises:
            RequestError: the interval cannot be read, differs from the first call's, or a step is unfinished and has
                gradients.
        """
        asked = Path(folder), every, keep
        if self._checkpoints is None:
            if keep < 1:
                raise RequestError(f"cannot keep {keep} checkpoints: give 1 at least")
            self._checkpoints = asked
            storage = LoopStorage(asked[0], keep, self._resumed)
            self._coordination.save_every(Interval.parse(every), storage)
        if asked != self._checkpoints:
            raise RequestError(
                f"group.checkpoint was called with {self._checkpoints} before, and with {asked} now: a loop has one "
                "folder and interval"
            )
        if self._coordination.state_due():
            self._coordination.send_state(self._own_state(), lambda: self._run_state(kept))

    def resume(self, folder: str | Path, *kept: Kept) -> bool:
        """Resume from the newest intact checkpoint in a folder, if there is one; all call it right after `distribute`.

        Args:
            folder: folder given to `checkpoint`, which all workers can read.
            *kept: see `load_state_dict`.

        Returns:
            Whether there was one.

        Raises:
            RequestError: see `load_state_dict`.
        """
        folder = Path(folder)
        name, remark = newest_in(folder)
        self._resumed = self._coordination.board.post_if_absent("script/resumed", name)
        if self.leads and remark:
            print_line(remark)
        if self._resumed:
            self.load(folder / self._resumed, *kept)
        return bool(self._resumed)

    def load_state_dict(self, state_dict: dict[str, Any], *kept: Kept) -> None:
        """Resume from a state of `state_dict`; all workers call it right after `distribute`.

        With the same number of workers, a synchronous run gives the same numbers as one without interruption. With
        another number, states are merged as by `polyrhythm train --resume`, and the rest of the epoch is divided among
        the present workers. `group.epochs` begins with the interrupted epoch, and each shard with its
        next batch. Random numbers of data loading processes in the middle of an epoch are drawn again.

        A group of another strategy continues with the model, the optimizer's state, schedules and counts, as
        `polyrhythm train --resume RUN --strategy OTHER` does; further state of the previous strategy is dropped.

        Args:
            state_dict: state of the whole run, from its coordinator.
            *kept: objects given to `state_dict`, in the same order; those of `group.epochs` get their state there.

        Raises:
            RequestError: training has begun, or the state is of another model or optimizer.
        """
        optimizer = self._optimized()
        assert self._replica is not None, "an optimizer is distributed with its model"
        text = resume(
            state_dict,
            self._strategy,
            self._replica,
            optimizer,
            self._coordination,
            kept,
            succeeds=self._world.rejoins,
        )
        if text and self.leads:
            print_line(text)

    def save(self, folder: str | Path, *kept: Kept) -> None:
        """Write the state of the run in the format of `torch.distributed.checkpoint`; see `state_dict`.

        Other tools read it by names such as `model.conv1.weight`. The folder appears whole or not at all, and replaces
        an earlier one. All workers call it; the coordinator writes, while the others continue.

        Args:
            folder: new folder, or an earlier one of `save`.
            *kept: see `state_dict`.

        Raises:
            RequestError: see `state_dict`, or the folder holds something else.
            RunError: the system could not write it.
        """
        state = self.state_dict(*kept)
        if state:
            write_folder(state, Path(folder))
            self._coordination.saved(Path(folder))

    def load(self, folder: str | Path, *kept: Kept) -> None:
        """Resume from a folder that `save` has written; see `load_state_dict`.

        Raises:
            RequestError: the folder holds no state, or a damaged one, or one of something else.
        """
        self.load_state_dict(read_folder(Path(folder)), *kept)

    def _check_draws(self) -> None:
        """Refuse dynamic batches with a synchronous strategy.

        Raises:
            RequestError: the workers are synchronous, all of them or in groups.
        """
        traits = self._strategy.traits(self.workers)
        if not traits.draws or any(len(group) > 1 for group in traits.groups):
            raise RequestError(
                f"shard: batches='dynamic': workers of {self._strategy} take their steps together, so each has its "
                "own share of every one: leave batches out, or join with an asynchronous strategy, such "
                "as parameter_server"
            )

    def _check_weights(self, weights: tuple[float, ...], loader: Iterable[Any], workers: int) -> None:
        """Refuse weights that cannot be used.

        Raises:
            RequestError: the message has the reason and a remedy.
        """
        size = getattr(loader, "batch_size", None)
        batch = workers * size if isinstance(size, int) else workers
        rule = Given(weights=weights)
        if not self._strategy.traits(workers).lockstep:
            raise RequestError(
                f"shard: weights: workers of {self._strategy} do not take their steps together, so fast ones can take "
                "more of them: leave weights out, or give batches='dynamic' where the strategy is asynchronous"
            )
        balances(rule, self._strategy, workers, batch)

    def average(self, value: float | Tensor, weight: float = 1.0) -> float:
        """Return the mean of the workers' values, the same on all; returns when all workers have called it.

        With an asynchronous strategy, the k-th call of a worker meets the k-th of the others, so the faster ones wait
        here for the slowest: call it once per epoch or at the end. It does not wait for failed workers, nor for a
        replacement that stays behind the others (in lockstep with servers).

        Args:
            value: value of this worker.
            weight: weight of this value in the mean, such as its number of images.
        """
        number = self._meeting("group.average")
        return self._coordination.means.mean(number, _number(value), float(weight))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all present workers, in their order, the same on all.

        They are sent as text through the store: for results and decisions, not for large tensors. It waits as
        `average` does.

        Args:
            value: value of this worker: numbers, texts, None, and lists and dicts of them.

        Raises:
            RequestError: the value holds something else, or the run is over.
        """
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RequestError(f"group.gather takes numbers, texts, lists and dicts: {error}") from None
        return self._coordination.means.gather(self._meeting("group.gather"), value)

    def _meeting(self, called: str) -> int:
        """Return the number of a meeting of all workers."""
        if self._optimizer is not None and self._optimizer.over:
            raise RequestError(f"the run is over: call {called} inside the `with` of polyrhythm.join")
        loop_progress = self._coordination.loop_progress
        number, loop_progress.averages = loop_progress.averages, loop_progress.averages + 1
        return number

    def joint_metric(self, metric: _Model) -> _Model:
        """Make a metric of torchmetrics compute over all workers, until the end of the `with`.

            accuracy = group.joint_metric(torchmetrics.Accuracy("multiclass", num_classes=10))

        All workers call its `compute`, which waits as `average` does. Metrics that are modules of the distributed model
        need no call of this method.

        Args:
            metric: a metric, or a collection of metrics.

        Returns:
            The same metric.
        """
        if len(self._world.roles.workers) > 1:
            self._part_metrics.append(join_metrics(metric, self.gather))
        return metric

    def log(self, **values: float | Tensor) -> None:
        """Log values of this worker's loop for the report of `join(report=…)`; without one, do nothing.

            group.log(loss=loss, accuracy=accuracy)

        Args:
            **values: numbers by name. `loss` is the training loss of the latest batch, plotted in reports over images
                seen. `test_top1`, `test_top5` and `test_loss`, logged by the coordinator, are the curves of tests.
        """
        if self._meter is not None:
            self._coordination.log({name: _number(value) for name, value in values.items()})

    def evaluate_async(
        self, function: Evaluate, *, on_error: Literal["raise", "skip"] = "raise"
    ) -> LoopEvaluation:
        """Evaluate a copy of the coordinator's model in a process of its own, while steps continue.

            for epoch in group.epochs(10):
                for images, labels in loader: ...
                group.evaluate_async(lambda model: {"test_top1": accuracy(model, test_loader)})

        The process is a fork, so the function may refer to anything, but changes nothing here; it has no GPU. The
        model is in evaluation mode, without gradients. Results are logged as by `log`, for the step of the copy. At
        most one evaluation runs and one waits: a newer one replaces the waiting one, which is reported once. The end of
        the `with` waits for both. On other workers this does nothing.

        Args:
            function: function of the model that returns numbers by name.
            on_error: `raise`: a function that fails ends the loop at a later step with a line that has its step;
                `skip`: that line is printed, and the loop continues.

        Returns:
            The evaluation: `values` are its results, once `done`; `wait()` returns them.

        Raises:
            RequestError: the model is on a GPU, memory is short, or nothing was distributed.
            RunError: an earlier evaluation has failed.
        """
        if on_error not in ("raise", "skip"):
            raise RequestError(f"group.evaluate_async: on_error is raise or skip, not {on_error!r}")
        self._optimized().settle()
        return self._coordination.evaluate(function, skips_failures=on_error == "skip")

    def print(self, *values: object) -> None:
        """Print on the coordinator."""
        if self.leads:
            print(*values, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsynchronize is not None:
            self._unsynchronize()
        for part in self._part_metrics:
            part()
        if (
            kind is SystemExit and self._optimizer is not None and self._optimizer.over
        ):  # the next stage follows
            if self._watch is not None:
                self._watch.close()
            return
        if self._optimizer is not None and kind is not None:
            self._optimizer.gradients.close()
        try:
            if kind is None:
                self._check_stages_counted()
                self._finish()
                return
        finally:
            if self._watch is not None:
                self._watch.close()
        if error is not None:
            self._coordination.fail(error)
        own, store = self._home.rendezvous.own, self._home.rendezvous.store
        with suppress(RuntimeError):  # the store may be closed already, and the raised error matters more
            if isinstance(error, Dismissed):
                store.set(f"{DISMISSED_KEY}/{own.rank}/{own.generation}", "")
            elif not isinstance(error, RunError):
                # A RunError is this worker's report of another worker's end.
                store.set(FAILED_KEY, str(own.rank))

    def _check_stages_counted(self) -> None:
        stage, counted = self._stage, self._coordination.epoch_count
        if stage is not None and not counted and stage.number < len(stage.stages.stages) - 1:
            raise RequestError(
                f"the loop has ended in the first stage, {stage.strategy}: stages change at the end of epochs that "
                "group.epochs counts, so go through them with it, or join with one strategy"
            )

    def _finish(self) -> None:
        if self._replica is None or self._optimizer is None:
            raise RequestError(
                "nothing was distributed: call group.distribute(model, optimizer) inside the `with`"
            )
        self._home.rendezvous.store.set(left_key(self.rank), "")
        with speaking_up(self._missing_text):
            self._optimizer.start()
            self._optimizer.settle()
            self._optimizer.finish()
            self.staleness = self._coordination.leave(self._replica, self._optimizer.steps)
            self._optimizer.over = True
            self._optimizer.gradients.close()
            self._home.close()

    def _missing_text(self) -> str:
        store = self._home.rendezvous.store.clone()  # the other thread may be waiting on the store itself
        missing = [
            str(worker)
            for worker, rank in enumerate(self._world.roles.workers)
            if not (store.check([left_key(worker)]) or self._home.is_lost(rank))
        ]
        return (
            f"worker {self.rank} has left the loop after {self._steps()} steps and waits for worker "
            f"{', '.join(missing)} to leave"
            if missing
            else ""
        )

    def _steps(self) -> int:
        return 0 if self._optimizer is None else self._optimizer.steps


def process_rank() -> int:
    """Return the rank of this process as set by its launcher; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def _channels_last(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a model's inputs, batches of images with channels innermost."""
    return tuple(
        channels_innermost(each)
        if isinstance(each, Tensor) and each.dim() == 4 and each.is_floating_point()
        else each
        for each in inputs
    )


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
