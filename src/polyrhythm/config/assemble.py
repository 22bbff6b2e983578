"""Build a job from a configuration: specs become objects, and impossible requests are refused before anything starts.

The parts are the data with their caches (decoded images on disk for later runs, in memory or on the GPU for later
epochs), the objective (loss, class weights, teachers), the image sizes (windows, size schedule), and a trial run
that constructs once what every rank will construct.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyrhythm.augmentation.chain import Chain, build_chain
from polyrhythm.augmentation.mixing import Mixer
from polyrhythm.augmentation.tones import Tones
from polyrhythm.augmentation.transforms.window import Window
from polyrhythm.augmentation.warp import Warp
from polyrhythm.communication.transports.shared_memory.barrier import is_tso
from polyrhythm.config.image_size import with_image_size
from polyrhythm.config.model import devices_from, model_maker, name_of
from polyrhythm.config.recipe import CONFIG_FILE
from polyrhythm.config.run_config import FORMER_PIXELS, RunConfig
from polyrhythm.config.trained import dealt_before, facts_of, load_trained, recorded, voters
from polyrhythm.cost import hybrid
from polyrhythm.data.balance import BALANCES, Balance
from polyrhythm.data.balances.measured import Measured
from polyrhythm.data.balances.off import Off
from polyrhythm.data.cached_split import CachedSplit, CacheLimit, CachePlan, Decoding
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.dealing import Dealt, images_dealt, steps_per_epoch
from polyrhythm.data.decoded_files import DecodedFiles, keep_decoded
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.data.label_skew import LabelSkew
from polyrhythm.data.open import open_data
from polyrhythm.data.resized import WindowSplit
from polyrhythm.data.shards import Streamed
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.launch.devices import check_kinds_of_devices
from polyrhythm.launch.torchrun.report_rank import started_by_torchrun
from polyrhythm.locations import file_system
from polyrhythm.models.architectures.sizes import is_sizes
from polyrhythm.models.architectures.treenet import Tree
from polyrhythm.models.create import check_image_size
from polyrhythm.models.weights import check_finite
from polyrhythm.partition.branches import parts_of
from polyrhythm.partition.cut import cut
from polyrhythm.partition.ownership import Ownership, divided_trunk
from polyrhythm.roles.balance import balances
from polyrhythm.roles.checkpoint_interval import EVERY_EPOCH, Interval
from polyrhythm.roles.job import (
    CheckpointConfig,
    EvaluationPlan,
    FaultTolerance,
    Job,
    Learning,
    check_network_use,
    steps_of,
)
from polyrhythm.run_files import exists_in_run
from polyrhythm.specs import Config, build, validated
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.divided_network import HasStages
from polyrhythm.strategies.strategy import Remarks, Strategy, Traits
from polyrhythm.training.batch_norm import BatchNorm
from polyrhythm.training.batch_schedules.constant import Constant
from polyrhythm.training.flat_parameters import FlatParameters, shards
from polyrhythm.training.forward_pass import Execution, Precision, check_execution, check_learns_alone
from polyrhythm.training.loss import Loss, Targets
from polyrhythm.training.objective import Objective, Teachers, Teaching
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizer_plan import OptimizerPlan, check_shards
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.schedule import BatchSchedule, Schedule, SizeSchedule

if TYPE_CHECKING:
    from polyrhythm.data.dataset import Split


OPTIMIZERS = ("polyrhythm.training.optimizers", "polyrhythm.training.joint_optimizers")
SCHEDULES = "polyrhythm.training.schedules"
BATCH_SCHEDULES = "polyrhythm.training.batch_schedules"
BATCH_NORMS = "polyrhythm.training.batch_norms"
# Batches that a thread prepares in advance. Enough to bridge a slow image, and little memory.
_AHEAD = 4

_log = logging.getLogger(__name__)


def strategy_from(spec: Any, compress: Any = None) -> Strategy:
    """Build a strategy from its spec.

    Args:
        spec: spec of the strategy.
        compress: spec of the compressor; None: none, or the one in `spec`.

    Raises:
        RequestError: unknown name or key, a value out of range, or a strategy that cannot be compressed.
    """
    made = _made("strategy", spec, *FAMILIES)
    assert isinstance(made, Strategy)
    if compress is None or compress == "none":
        return made
    return compressed(made, compress)


def compressed(strategy: Strategy, compress: Any) -> Strategy:
    """Return a strategy with a compressor of what it sends.

    Raises:
        RequestError: it cannot have one, or has one already.
    """
    if not isinstance(strategy, Compressible):
        raise RequestError(f"compress: {strategy.name} cannot be compressed: {strategy.why_not_compressed}")
    given = {key: getattr(strategy, key) for key in strategy.model_fields_set}
    if given.get("compress") is not None:
        raise RequestError(f"compress is given twice, for {strategy} as well: leave one of them out")
    return validated(f"strategy {strategy.name}", type(strategy), given | {"compress": compress})


def balance_from(config: RunConfig, strategy: Strategy) -> Balance:
    """Build the balance that a configuration asks for.

    Raises:
        RequestError: it cannot be used with this strategy, or with these workers and batches.
    """
    made = _made("balance", config.balance, BALANCES)
    assert isinstance(made, Balance)
    if isinstance(made, Measured) and made.profile and not made.weights:
        made = _by_profile(made, config.workers)
    batch, drawn = config.workers * config.worker_batch, config.batches != "static"
    if not balances(made, strategy, config.workers, batch, compiled=config.compile, drawn=drawn):
        return Off()
    if config.on_loss == "rescale":
        if not made.optional:
            raise RequestError(
                f"balance {made}: with on_loss rescale a failed worker's part is dropped, and parts must be equal: "
                "leave one of them out"
            )
        return Off()
    return made


def _by_profile(balance: Measured, workers: int) -> Measured:
    """Return a balance that begins with the speeds of a cluster's hosts, which workers fill one after the other."""
    from polyrhythm.simulation.cluster import open_cluster  # imported only by simulated runs

    hosts = open_cluster(balance.profile).hosts
    speeds = [kind.speed for kind in hosts for _ in range(kind.count * kind.places)]
    if len(speeds) < workers:
        raise RequestError(
            f"balance {balance}: the hosts of {balance.profile} have places for {len(speeds)} of {workers} workers: "
            "give weights, one for each worker"
        )
    return balance.model_copy(update={"weights": tuple(speeds[:workers]), "profile": ""})


def draws(config: RunConfig, strategy: Strategy, workers: int) -> bool:
    """Return whether batches are assigned dynamically.

    Raises:
        RequestError: they are to be, and the strategy has workers take equally many steps, or each has to know its
            images in advance.
    """
    possible = strategy.traits(workers).draws
    if config.svrg == "own":
        if config.batches == "dynamic":
            raise RequestError(
                "svrg own needs each worker's images in advance: leave batches out, or use svrg all"
            )
        return False
    if config.batches == "dynamic" and not possible:
        raise RequestError(
            f"{strategy} with {workers} workers has all of them take equally many steps, so each has its own share: "
            "leave batches out, or choose an asynchronous strategy, such as parameter_server"
        )
    return possible and config.batches != "static"


def warn_of(strategy: Strategy, workers: int, learning_rate: float) -> None:
    """Log a warning if the strategy is allowed but likely to go wrong with these values."""
    caution = strategy.caution(workers, learning_rate) if isinstance(strategy, Remarks) else ""
    if caution:
        _log.warning("strategy %s: %s", strategy, caution)


def warn_of_cut(strategy: Strategy, workers: int, batch_size: int, head: Sequence[int]) -> None:
    """Log a warning if cutting the layers at a network's end sends more than all-reducing their gradients.

    Args:
        strategy: strategy with jointly computed layers.
        workers: number of workers.
        batch_size: batch size of one worker.
        head: features that go into the layers, and the neurons of each.
    """
    features, *widths = head
    cut, whole = (
        hybrid.received(workers, batch_size, features, widths),
        hybrid.data_parallel(workers, features, widths),
    )
    if cut > whole > 0:
        _log.warning(
            "strategy %s: its layers of %s neurons, cut, cost %.1f times the traffic of their gradients with batches "
            "of %d: take synchronous, or batches of %d images at most",
            strategy,
            ", ".join(map(str, widths)),
            cut / whole,
            batch_size,
            max(1, int(whole / hybrid.received(workers, 1, features, widths))),
        )


def checkpoints_of(config: RunConfig, folder: Path | None = None, **more: Any) -> CheckpointConfig:
    """Return the files of a run.

    Args:
        config: run configuration.
        folder: run folder.
        **more: other fields of `CheckpointConfig`.

    Raises:
        RequestError: the interval between checkpoints cannot be read.
    """
    every = Interval.parse(config.checkpoint_every)
    return CheckpointConfig(
        folder=folder,
        checkpoints=config.keep_checkpoints,
        best=config.keep_best,
        every=every,
        mirror=config.checkpoint_mirror,
        **more,
    )


def assemble(config: RunConfig, checkpointing: CheckpointConfig, dataset: Dataset | None = None) -> Job:
    """Build the job that a configuration describes.

    Args:
        config: configuration of the run.
        checkpointing: checkpoint options of the run, with its folder.
        dataset: data of the run; None: opened from the configuration.

    Raises:
        RequestError: the request is invalid.
    """
    strategy = strategy_from(config.strategy, config.compress)
    strategy.check(config.workers)
    _check_together(config, strategy)
    if config.clients is not None and config.label_skew is None:
        raise RequestError("clients: they differ by their classes: give --label-skew, such as 0.1")
    if config.label_skew is not None:
        config = _with_own_images(config, strategy)
    if config.tensorboard and find_spec("tensorboard") is None:
        raise RequestError(
            "--tensorboard takes the package of that name: pip install 'polyrhythm[tensorboard]'"
        )
    devices = devices_from(config.device, config.workers)
    if len({device.type for device in devices}) > 1:
        check_kinds_of_devices(strategy, config.workers)
    precision, device = min(
        ((Precision.choose(config.precision, each), each) for each in devices),
        key=lambda pair: pair[1].type == "cpu",
    )
    how = _Rules.of(config, strategy)
    if dataset is None:
        dataset = data_of(config, checkpointing.folder)
    dataset = with_caches(dataset, config, device)
    if config.label_skew is not None and isinstance(dataset.train, Streamed):
        raise RequestError(
            "label_skew: tar shards are read in an order of their own: give a folder of images"
        )
    epochs = epochs_of(config, dataset, strategy)
    make_model = model_maker(config.model, dataset, config.weights, config.freeze)
    if isinstance(strategy, HasStages):
        together = config.workers * config.worker_batch
        strategy = strategy.with_copies(make_model, dataset.image_shape, config.workers, together)
    numbers = try_out(make_model, how.optimizer, strategy, config.workers, dataset.image_shape)
    job = Job(
        strategy=strategy,
        workers=config.workers,
        dataset=dataset,
        make_model=make_model,
        model_name=name_of(config.model),
        learning=how.learning(
            config, dataset, size_schedule_from(config, dataset, make_model, epochs), epochs
        ),
        checkpointing=checkpointing,
        fault_tolerance=FaultTolerance(
            min_workers=config.min_workers,
            vacant=config.vacant,
            notice_s=config.notice_s,
            restarts=config.restarts,
            rescale=config.on_loss == "rescale",
            silence_s=config.silence_s,
            digest_every=config.digest_every,
            skips_not_finite=config.on_not_finite == "skip",
        ),
        device=device,
        devices=devices if len(set(devices)) > 1 else (),
        ahead=_AHEAD if how.transform is not None or _is_slow(dataset) else 0,
        timings=config.timings,
        until=Target.parse(config.until) if config.until is not None else None,
        evaluation=evaluation_of(config, strategy, device),
        numbers=numbers,
        balance=balance_from(config, strategy),
        draws=draws(config, strategy, config.workers),
    )
    check_network_use(strategy, config.workers, precision.dtype, job.learning)
    # A schedule that cannot work with this number of steps raises now, not at the first step of every worker.
    how.schedule.factor(0, job.length)
    check_execution(job.learning.execution, make_model, dataset.image_shape, device)
    if config.on_not_finite == "skip" and (job.traits.cuts_network or job.learning.batch_norm.over_workers):
        raise RequestError(
            f"on_not_finite skip: with {'strategy ' + str(strategy) if job.traits.cuts_network else 'this batch_norm'} "
            "workers exchange inside their passes, which none can leave: use end"
        )
    if config.batch_norm != "plain":
        with torch.random.fork_rng(devices=[]):
            job.learning.batch_norm.prepare(make_model())
    # Batch norm has no variance of a single value per channel; the error would be raised deep inside a rank.
    if job.calendar.images(0, 0) == 1:
        check_learns_alone(make_model, dataset.image_shape)
    _warn_of_random_parts(config)  # last: a request that is refused gets no warning
    if how.transform is not None:
        _warn_of_frames(how.transform, dataset)
    warn_of(strategy, config.workers, how.optimizer.lr)
    if job.traits.cuts_network and not job.traits.pipelines:
        made = make_model()
        if not isinstance(made, Tree):
            warn_of_cut(strategy, config.workers, config.batch_size, cut(made, None).sizes)
    return job


def evaluation_of(config: RunConfig, strategy: Strategy, device: torch.device) -> EvaluationPlan:
    """Return the place of the tests during a run; `auto` is in place until the cores of a host are known.

    Raises:
        RequestError: steps cannot continue during tests.
    """
    if config.evaluation != "async":
        return EvaluationPlan()
    reason = why_steps_wait(strategy.traits(config.workers), device)
    if reason:
        raise RequestError(f"evaluation async: {reason}: give in_place")
    return EvaluationPlan(continues=True, skips=config.until is None and not config.keep_best)


def why_steps_wait(traits: Traits, device: torch.device) -> str:
    """Return why steps cannot continue during a test; empty: they can."""
    if traits.cuts_network:
        return "the workers of this strategy compute one network together, which only they can test"
    if device.type != "cpu":
        return f"a process that computes on {device.type} cannot be copied for a test"
    return ""


def _check_joinable(config: RunConfig, strategy: Strategy) -> None:
    """Refuse `listen`, `vacant` and `token_file` where no worker could ever join."""
    if config.listen is None:
        for key in ("vacant", "token_file"):
            if getattr(config, key):
                raise RequestError(f"{key} is for runs that can be joined: give listen, too")
        return
    traits = strategy.traits(config.workers)
    if traits.one_host:
        raise RequestError(
            f"workers cannot join {strategy}, which uses the shared memory of one host: leave out listen, or choose "
            "another strategy, such as parameter_server"
        )
    if not strategy.faults(config.workers).continues:
        raise RequestError(
            f"workers cannot join {strategy} with {config.workers} workers, which stops without one: leave out "
            "listen, or choose another strategy, such as parameter_server"
        )
    if config.freeze_epochs is not None:
        raise RequestError("freeze_epochs makes two runs of one, which workers cannot join: leave out listen")
    if not isinstance(config.data, str | Path) or not isinstance(config.model, str):
        raise RequestError("guests find data and model by their names: give names, or leave out listen")
    if config.vacant >= config.workers:
        raise RequestError(
            f"vacant is {config.vacant} of {config.workers} workers, but worker 0 starts here: ask for fewer"
        )


def _check_together(config: RunConfig, strategy: Strategy) -> None:
    """Refuse values that are valid alone but not together."""
    if config.min_workers > config.workers:
        raise RequestError(
            f"min_workers is {config.min_workers}, but there are only {config.workers} workers: ask for as many at most"
        )
    _check_joinable(config, strategy)
    if config.keep_best and not config.keep_checkpoints:
        raise RequestError("keep_best needs a checkpoint, but keep_checkpoints is 0: give 1 at least")
    every = Interval.parse(config.checkpoint_every)
    asked = [
        key
        for key, given in (
            ("checkpoint_every", every != EVERY_EPOCH),
            ("checkpoint_mirror", config.checkpoint_mirror),
        )
        if given
    ]
    if asked and not config.keep_checkpoints:
        raise RequestError(
            f"{asked[0]} needs checkpoints, but keep_checkpoints is 0: give 1 at least, or leave it out"
        )
    if config.checkpoint_mirror is not None:
        file_system(config.checkpoint_mirror, "mirror")
    Targets(config.label_smoothing)
    if config.until is not None:
        Target.parse(config.until)


def _with_own_images(config: RunConfig, strategy: Strategy) -> RunConfig:
    """Return a configuration in which each worker has images of its own, equally many.

    Raises:
        RequestError: an option gives a worker's images to others.
    """
    if strategy.traits(config.workers).cuts_network:
        raise RequestError(
            f"label_skew: workers of {strategy.name} compute one network for the same images: use local_sgd, or leave "
            "it out"
        )
    if config.clients is not None and config.clients < config.workers:
        raise RequestError(
            f"{config.clients} clients are fewer than {config.workers} workers: give --clients {config.workers} or more"
        )
    if config.batches == "dynamic":
        raise RequestError("label_skew: dynamic batches go to any worker: use --batches static")
    if str(config.balance) not in ("auto", "off"):
        raise RequestError("label_skew: every worker has equally many images: use --balance off")
    return config.model_copy(update={"batches": "static", "balance": "off"})


def _warn_of_random_parts(config: RunConfig) -> None:
    """Warn if frozen parts keep their random initial values; a network object may bring its own weights."""
    if config.weights is None and isinstance(config.model, str) and config.freeze not in ("none", "norms"):
        _log.warning(
            "freeze %s keeps untrained parts of a network at random values: give weights to start from, "
            "or leave freeze out",
            config.freeze,
        )


def _warn_of_frames(chain: Chain, dataset: Dataset) -> None:
    """Warn if warps fill with a frame although images continue around the visible square."""
    framed = [each for each in chain.transforms if isinstance(each, Warp) and each.fill == "zero"]
    if framed and dataset.shown < 1 and not isinstance(dataset.train, WindowSplit):
        _log.warning(
            "%s see the center square of the images only, and leave gray corners although the images continue "
            "there: give "
            "--scale %d to move the larger image, or fill=reflect",
            "; ".join(each.name for each in framed),
            round(dataset.image_shape[1] / dataset.shown),
        )


@dataclass(frozen=True)
class _Rules:
    """The parts of a configuration that are named by specs and need no data."""

    optimizer: OptimizerConfig
    schedule: Schedule
    batch_schedule: BatchSchedule
    batch_norm: BatchNorm
    transform: Chain | None

    @classmethod
    def of(cls, config: RunConfig, strategy: Strategy) -> _Rules:
        """Build them, and log what may go wrong with the strategy."""
        optimizer = optimizer_from(config, strategy)
        schedule = _made("schedule", config.schedule, SCHEDULES)
        assert isinstance(schedule, Schedule)
        batch_schedule = _made("batch schedule", config.batch_schedule, BATCH_SCHEDULES)
        assert isinstance(batch_schedule, BatchSchedule)
        batch_norm = _made("batch norm", config.batch_norm, BATCH_NORMS)
        assert isinstance(batch_norm, BatchNorm)
        return cls(optimizer, schedule, batch_schedule, batch_norm, build_chain(config.augment))

    def learning(self, config: RunConfig, dataset: Dataset, sizes: SizeSchedule, epochs: int) -> Learning:
        """Return how a replica learns from the data."""
        chain = chain_from(config, self.transform, dataset)
        mixings = () if chain is None else chain.mixings
        return Learning(
            optimizer=self.optimizer,
            schedule=self.schedule,
            epochs=epochs,
            updates=config.updates,
            drop_last=config.drop_last,
            label_skew=None
            if config.label_skew is None
            else LabelSkew(config.label_skew, config.seed, config.clients),
            batch_size=config.worker_batch,
            accumulate=config.accumulate,
            batch_schedule=self.batch_schedule,
            batch_norm=self.batch_norm,
            seed=config.seed,
            objective=objective_from(config, dataset),
            precision=config.precision,
            weight_average=config.weight_average,
            svrg=config.svrg,
            rate_decay=config.rate_decay,
            execution=Execution(
                compiled=config.compile,
                channels_last=config.channels_last,
                checkpoints_activations=config.activation_checkpointing,
            ),
            transform=chain,
            mixer=Mixer(mixings, len(dataset.classes)) if mixings else None,
            size_schedule=sizes,
        )


def opened(config: RunConfig, dealt: Dealt = None) -> Dataset:
    """Open the data of a run; for a network of sizes alone there need be none."""
    if is_sizes(config.model) and "data" not in config.model_fields_set:
        return without_images()
    config = with_image_size(config)
    return open_data(
        config.data,
        image_size=config.image_size,
        scale=config.scale,
        skip_unreadable=config.skip_unreadable,
        pixels=config.pixels,
        dealt=dealt,
    )


def without_images(classes: int = 1, side: int = 1) -> Dataset:
    """Return data of some classes and pixels a side without images, for runs that only count them."""
    none = TensorSplit(torch.zeros(1, 3, side, side), torch.zeros(1))
    return Dataset("images", none, none, tuple(map(str, range(classes))), (3, side, side), 1)


def data_of(config: RunConfig, folder: Path | None = None) -> Dataset:
    """Open the data of a run, with the classes and the held-out images that its folder records.

    Args:
        config: configuration of the run.
        folder: folder of a run that may have begun; None: a new run.

    Raises:
        RequestError: there are fewer training images than workers, or the run has been trained on other classes.
    """
    record = dealt = None
    if folder is not None and exists_in_run(folder / CONFIG_FILE):
        record = recorded(folder)
        dealt = dealt_before(record)
    elif config.weights is not None and os.path.exists(config.weights):
        before = recorded(Path(config.weights))
        dealt = None if before is None else before.sides  # no image that these weights learned from is tested
    dataset = opened(config, dealt)
    if record is not None:
        dataset = record.continued(dataset, str(folder))
        if changes := record.changes(dataset):
            _log.warning("%s has changed since %s was begun: %s", dataset.name, folder, changes)
    if config.workers > len(dataset.train):
        raise RequestError(
            f"{config.workers} workers cannot share {len(dataset.train)} training images: ask for fewer workers"
        )
    return dataset


def check_length(config: RunConfig, images: int) -> None:
    """Reject a length that is given twice or impossible with this number of training images.

    Raises:
        RequestError: the length is wrong; the message has a remedy.
    """
    if config.updates is not None:
        if config.epochs is not None:
            raise RequestError("--updates and --epochs both set the length: give one of them")
        if _made("batch schedule", config.batch_schedule, BATCH_SCHEDULES) != Constant():
            raise RequestError(
                f"--updates counts batches of one size, and batch schedule {config.batch_schedule} changes it: give "
                "--epochs"
            )
    together = config.workers * config.worker_batch
    if config.drop_last and images < together:
        raise RequestError(
            f"drop_last leaves nothing of {images} training images, since a step of {config.workers} workers has "
            f"{together}: take smaller batches, or leave drop_last out"
        )


def epochs_of(config: RunConfig, dataset: Dataset, strategy: Strategy) -> int:
    """Return the epochs that a run begins.

    Raises:
        RequestError: its length is given twice or impossible.
    """
    images, workers = len(dataset.train), config.workers
    check_length(config, images)
    if config.updates is None:
        return config.epochs or dataset.default_epochs
    traits, updates = strategy.traits(workers), config.updates
    full = workers * config.worker_batch
    if draws(config, strategy, workers):
        full = max(1, full // len(traits.units(workers)))
    else:
        updates = steps_of(updates, traits, workers)
    whole = images_dealt(images, [full], drop_last=config.drop_last)[0]
    return -(-updates // steps_per_epoch(whole, 1, full))


def optimizer_from(config: RunConfig, strategy: Strategy) -> OptimizerConfig:
    """Return the optimizer that a configuration asks for, or the default one of its strategy.

    Raises:
        RequestError: there is no such optimizer.
    """
    chosen = default_optimizer(strategy, config.workers) if config.optimizer is None else config.optimizer
    made = _made("optimizer", chosen, *OPTIMIZERS)
    assert isinstance(made, OptimizerConfig)
    if config.clip_norm is None:
        return made
    if made.clip_norm not in (None, config.clip_norm):
        raise RequestError(f"--clip-norm {config.clip_norm:g} and optimizer {made} differ: give one of them")
    return made.model_copy(update={"clip_norm": config.clip_norm})


LATE_RATE = 0.3
"""Sum of the learning rates of the gradients applied one by one during a step of all workers; without momentum."""


def default_optimizer(strategy: Strategy, workers: int) -> OptimizerConfig:
    """Return the strategy's own, or SGD with its usual rate, or one that late gradients bear.

    N gradients that are applied one by one are N-1 updates old on average; dividing the rate by that age is the
    rule of Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD", IJCAI 2016. Their age acts as momentum (Mitliagkas,
    Zhang, Hadjis, Ré, "Asynchrony begets momentum", Allerton 2016), and with it explicit momentum buys no stability:
    what counts is the effective rate, lr / (1 - momentum), which must be 3/5 of the usual one
    (`benchmarks/asynchrony`).
    """
    traits = strategy.traits(workers)
    if traits.optimizer:
        own = build("optimizer", traits.optimizer, *OPTIMIZERS)
        assert isinstance(own, OptimizerConfig)
        return own
    usual = SGD()
    if traits.updates == 1:
        return usual
    return SGD(lr=float(f"{LATE_RATE / traits.updates:.3g}"), momentum=0)


def _made(what: str, spec: Any, *packages: str) -> Config:
    return spec if isinstance(spec, Config) else build(what, str(spec), *packages)


def _is_slow(dataset: Dataset) -> bool:
    """Whether preparing a batch takes long enough to deserve a thread of its own."""
    return not isinstance(dataset.train, TensorSplit)


def with_caches(dataset: Dataset, config: RunConfig, device: torch.device) -> Dataset:
    """Return the same data with its decoded images cached as the configuration asks.

    Raises:
        RequestError: a cache is of no use for such data, or does not fit.
    """
    if config.decoded is not None:
        train, test = (
            _on_disk(split, config.decoded, dataset.name) for split in (dataset.train, dataset.test)
        )
        dataset = replace(dataset, train=train, test=test)
    limit = CacheLimit.parse(config.cache)
    if limit.size_bytes == 0:
        return dataset
    decoding = _inmost(dataset.train)
    needless = _needless(decoding, device)
    # `auto` is ignored where a cache is of no use; a requested size is an error there.
    if needless and limit.size_bytes is None:
        return dataset
    if needless or not isinstance(decoding, Decoding):
        raise RequestError(f"cache {config.cache}: the images of {dataset.name} {needless}: leave cache out")
    cached = CachedSplit(decoding, _plan(limit, config.workers, device))
    return replace(dataset, train=_instead(dataset.train, cached))


def _inmost(split: Split) -> Split:
    """Return the split that windows are cut out of, or the split itself."""
    return split.larger if isinstance(split, WindowSplit) else split


def _instead(split: Split, inmost: Split) -> Split:
    """Return `split` with its innermost split replaced."""
    return split.over(inmost) if isinstance(split, WindowSplit) else inmost


def _on_disk(split: Split, folder: str, name: str) -> Split:
    files = _inmost(split)
    if not isinstance(files, ImageFileSplit):
        raise RequestError(
            f"decoded keeps what image files hold, and {name} is not made of them: leave it out"
        )
    return _instead(split, keep_decoded(files, folder))


def _needless(split: Split, device: torch.device) -> str:
    """Return why a cache would be of no use; an empty string if it would be."""
    if not isinstance(split, Decoding):
        return "are not decoded here, or differ each time"
    if device.type == "cpu" and isinstance(split, TensorSplit):
        return "are in memory already"
    if device.type == "cpu" and isinstance(split, DecodedFiles):
        return "are kept by the system, as files that were read"
    return ""


def _plan(limit: CacheLimit, workers: int, device: torch.device) -> CachePlan:
    apart = started_by_torchrun()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if apart else workers
    # A process sees an image as kept only after its bytes, where stores become visible in their order.
    shared = device.type == "cpu" and not apart and is_tso()
    return CachePlan(limit=limit, processes=processes, shared=shared)


LOSSES = "polyrhythm.training.losses"


def objective_from(config: RunConfig, dataset: Dataset) -> Objective:
    """Build the objective of a run.

    Raises:
        RequestError: unknown loss, a number out of range, or teachers that do not fit the data.
    """
    loss = config.loss if isinstance(config.loss, Loss) else build("loss", str(config.loss), LOSSES)
    assert isinstance(loss, Loss)
    weights = balanced_weights(dataset) if config.class_weights == "balanced" else None
    targets = Targets(config.label_smoothing, weights)
    teaching = Teaching(config.temperature, config.teacher_share)
    return Objective(loss, targets, _teachers(config, dataset, teaching))


def balanced_weights(dataset: Dataset) -> Tensor:
    """Return a weight per class, (K,), n / (K n_k), so that all classes count alike; 0 for a class without images.

    The mean weight of the training images is 1, so the learning rate keeps its meaning.
    """
    counts = torch.bincount(dataset.train.labels, minlength=len(dataset.classes))
    present = int((counts > 0).sum())
    return torch.where(counts > 0, counts.sum() / (present * counts.clamp_min(1)), 0.0).float()


def _teachers(config: RunConfig, dataset: Dataset, teaching: Teaching) -> Teachers | None:
    if config.teacher is None:
        return None
    named = [Path(part.strip()) for part in config.teacher.split(";") if part.strip()]
    paths = [path for each in named for path in voters(each)]
    if not paths:
        raise RequestError("--teacher names no run: give a run folder, or several with ; between")
    for path in paths:
        theirs = facts_of(path).get("pixels") or "imagenet"
        if FORMER_PIXELS.get(theirs, theirs) != (config.pixels or "imagenet"):
            raise RequestError(
                f"{path} learned from pixels normalized otherwise: give the --pixels of its config.yaml"
            )
    # Constructing networks draws weights; the random numbers of the run must not depend on whether there is a teacher.
    with torch.random.fork_rng(devices=[]):
        trained = [load_trained(path, dataset=dataset) for path in paths]
    for each in trained:
        check_finite(each.model, each.path)
    return Teachers(
        [each.model.cpu() for each in trained],
        [each.dataset.image_shape[-1] for each in trained],
        teaching,
    )


SIZE_SCHEDULES = "polyrhythm.training.size_schedules"


def chain_from(config: RunConfig, chain: Chain | None, dataset: Dataset) -> Chain | None:
    """Return the augmentations of a data set; a random window is applied first where images are larger."""
    if config.scale is not None:
        window = Window(size=dataset.image_shape[1])
        after = Chain(()) if chain is None else chain
        chain = replace(after, transforms=(window, *after.transforms))
    return None if chain is None else chain.on(Tones(dataset.black, dataset.white))


def size_schedule_from(
    config: RunConfig, dataset: Dataset, make_model: Callable[[], nn.Module], epochs: int
) -> SizeSchedule:
    """Build the schedule of image sizes, and try the network on every size.

    Raises:
        RequestError: unknown schedule, a size beyond that of the images, or one that the network does not support.
    """
    schedule = build("size schedule", str(config.size_schedule), SIZE_SCHEDULES)
    assert isinstance(schedule, SizeSchedule)
    channels, *shape = dataset.image_shape
    sides = {schedule.side(epoch, epochs, min(shape)) for epoch in range(epochs)} - set(shape)
    if not sides:
        return schedule
    if shape[0] != shape[1]:
        raise RequestError(f"size schedule {schedule} needs square images: give an --image-size")
    with torch.random.fork_rng(devices=[]):
        model = make_model()
    for side in sorted(sides):
        try:
            check_image_size(model, "", len(dataset.classes), (channels, side, side))
        except RequestError:
            raise RequestError(
                f"size schedule {schedule} has images of {side} pixels, which the model does not support: give other "
                "sizes, or a network that ends in a global pooling, such as resnet18"
            ) from None
    return schedule


def try_out(
    make_model: partial[nn.Module],
    optimizer: OptimizerConfig,
    strategy: Strategy,
    workers: int,
    image_shape: tuple[int, int, int],
) -> int:
    """Construct model and optimizer once, check that the strategy can work with them, and return their elements.

    The number counts all parameters and buffers. `image_shape` is (C, H, W).
    """
    with torch.random.fork_rng(devices=[]):
        model = make_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        made = optimizer.create(trained)
    except ValueError as error:
        raise RequestError(f"optimizer {optimizer}: {error}") from None
    traits = strategy.traits(workers)
    if traits.shards and not traits.local_models:  # else workers update their whole model
        check_shards(made, model, traits.shards)
    flat = FlatParameters(model)
    if traits.shards:
        shards(flat.size, traits.shards)
    strategy.check_model(flat)
    strategy.check(workers, OptimizerPlan.of(made, flat))
    if isinstance(strategy, HasStages):
        with torch.random.fork_rng(devices=[]):
            strategy.check_network(model, flat, flat.vector.new_zeros(1, *image_shape), workers)
    elif traits.cuts_network:
        with torch.random.fork_rng(devices=[]):
            image = flat.vector.new_zeros(1, *image_shape)
            parts = parts_of(model, image)
            Ownership.of(flat, parts, workers, divided_trunk(parts, image, traits.trunk, workers))
    return sum(value.numel() for value in (*model.parameters(), *model.buffers()))
