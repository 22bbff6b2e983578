"""From a configuration to a job: names become objects, and what cannot be is refused before anything starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.augmentation.chain import Chain, build_chain
from polyrhythm.config.caching import with_caches
from polyrhythm.config.model import device_from, model_maker, name_of
from polyrhythm.config.objective import objective_from
from polyrhythm.config.picture_sizes import chain_from, size_schedule_from
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.trying_out import try_out
from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Job, Keeping, Learning, Losses
from polyrhythm.roles.network_use import check_network_use
from polyrhythm.specs import Config, build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.batch_schedule import BatchSchedule
from polyrhythm.training.loss import Targets
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.optimizers.sgd import SGD
from polyrhythm.training.passes.execution import Execution
from polyrhythm.training.passes.lone_pictures import check_learns_alone
from polyrhythm.training.passes.precision import Precision
from polyrhythm.training.schedule import Schedule
from polyrhythm.training.size_schedule import SizeSchedule

OPTIMIZERS = "polyrhythm.training.optimizers"
SCHEDULES = "polyrhythm.training.schedules"
BATCH_SCHEDULES = "polyrhythm.training.batch_schedules"
_AHEAD = 4

_log = logging.getLogger(__name__)


def strategy_from(spec: Any) -> Strategy:
    """Makes a strategy from its spec.

    Raises:
        RequestError: unknown name or key, or a value out of its range.
    """
    made = _made("strategy", spec, *FAMILIES)
    assert isinstance(made, Strategy)
    return made


def warn_of(strategy: Strategy, workers: int, learning_rate: float) -> None:
    """Logs what may go wrong with a strategy though it is allowed."""
    caution = strategy.caution(workers, learning_rate)
    if caution:
        _log.warning("strategy %s: %s", strategy, caution)


def assemble(config: RunConfig, keeping: Keeping) -> Job:
    """Makes the job that a configuration describes.

    Args:
        config: checked values.
        keeping: what the run leaves on disk.

    Raises:
        RequestError: whatever of the request is wrong.
    """
    strategy = strategy_from(config.strategy)
    strategy.check(config.workers)
    _check_together(config, strategy)
    _warn_of_random_parts(config)
    device = device_from(config.device)
    precision = Precision.choose(config.precision, device)
    how = _Rules.of(config, strategy)
    dataset = with_caches(_data(config), config, device)
    make_model = model_maker(config.model, dataset, config.weights, config.freeze)
    numbers = try_out(make_model, how.optimizer, strategy, config.workers, dataset.image_shape)
    job = Job(
        strategy=strategy,
        workers=config.workers,
        dataset=dataset,
        make_model=make_model,
        model_name=name_of(config.model),
        learning=how.learning(config, dataset, size_schedule_from(config, dataset, make_model)),
        keeping=keeping,
        losses=Losses(
            min_workers=config.min_workers,
            vacant=config.vacant,
            notice_s=config.notice_s,
            restarts=config.restarts,
            rescale=config.on_loss == "rescale",
            silence_s=config.silence_s,
        ),
        device=device,
        ahead=_AHEAD if how.transform is not None or _is_slow(dataset) else 0,
        timings=config.timings,
        numbers=numbers,
    )
    check_network_use(strategy, config.workers, precision.dtype, job.learning)
    how.schedule.factor(0, job.length)
    job.learning.execution.check(make_model, dataset.image_shape, device)
    if job.calendar.images(0, 0) == 1:
        check_learns_alone(make_model, dataset.image_shape)
    return job


def _check_joinable(config: RunConfig, strategy: Strategy) -> None:
    """Refuses to keep places, or a door open, where nobody could come in."""
    if config.listen is None:
        for key in ("vacant", "token_file"):
            if getattr(config, key):
                raise RequestError(f"{key} is for those who join: say where they can, with listen")
        return
    if strategy.one_host:
        raise RequestError(
            f"nobody can join {strategy}, whose workers share the memory of one host: leave out listen, or choose "
            "another strategy, such as parameter_server"
        )
    if not strategy.goes_on(config.workers):
        raise RequestError(
            f"nobody can join {strategy} with {config.workers} workers, which does not go on without one: leave out "
            "listen, or choose another strategy, such as parameter_server"
        )
    if config.freeze_epochs is not None:
        raise RequestError("freeze_epochs makes two runs of one, which nobody can join: leave out listen")
    if not isinstance(config.data, str | Path) or not isinstance(config.model, str):
        raise RequestError("who joins finds data and model by their names: give names, or leave out listen")
    if config.vacant >= config.workers:
        raise RequestError(
            f"vacant is {config.vacant} of {config.workers} workers, but worker 0 starts here: ask for fewer"
        )


def _check_together(config: RunConfig, strategy: Strategy) -> None:
    """Refuses values that are right alone, and wrong together."""
    if config.min_workers > config.workers:
        raise RequestError(
            f"min_workers is {config.min_workers}, but there are only {config.workers} workers: ask for as many at most"
        )
    _check_joinable(config, strategy)
    if config.keep_best and not config.keep_checkpoints:
        raise RequestError("keep_best wants a checkpoint kept, but keep_checkpoints is 0: ask for 1 at least")
    Targets(config.label_smoothing)


def _warn_of_random_parts(config: RunConfig) -> None:
    """Logs that parts stay as they were drawn, which is seldom meant; a network object may bring its weights."""
    if config.weights is None and isinstance(config.model, str) and config.freeze not in ("none", "norms"):
        _log.warning(
            "freeze %s keeps parts of a network that nobody has trained at random numbers: give weights to start from, "
            "or leave freeze out",
            config.freeze,
        )


@dataclass(frozen=True)
class _Rules:
    """What a configuration names by specs, and needs no data to be made."""

    optimizer: OptimizerConfig
    schedule: Schedule
    batch_schedule: BatchSchedule
    transform: Chain | None

    @classmethod
    def of(cls, config: RunConfig, strategy: Strategy) -> _Rules:
        """Makes them, and logs what may go wrong with the strategy."""
        chosen = config.optimizer
        optimizer = _made(
            "optimizer",
            _default_optimizer(strategy, config.workers) if chosen is None else chosen,
            OPTIMIZERS,
        )
        assert isinstance(optimizer, OptimizerConfig)
        schedule = _made("schedule", config.schedule, SCHEDULES)
        assert isinstance(schedule, Schedule)
        warn_of(strategy, config.workers, optimizer.lr)
        batch_schedule = _made("batch schedule", config.batch_schedule, BATCH_SCHEDULES)
        assert isinstance(batch_schedule, BatchSchedule)
        return cls(optimizer, schedule, batch_schedule, build_chain(config.augment))

    def learning(self, config: RunConfig, dataset: Dataset, sizes: SizeSchedule) -> Learning:
        """Gives how a replica learns from the data."""
        return Learning(
            optimizer=self.optimizer,
            schedule=self.schedule,
            epochs=config.epochs or dataset.default_epochs,
            batch_size=config.batch_size,
            batch_schedule=self.batch_schedule,
            seed=config.seed,
            objective=objective_from(config, dataset),
            precision=config.precision,
            weight_average=config.weight_average,
            rate_decay=config.rate_decay,
            execution=Execution(compiled=config.compile, channels_last=config.channels_last),
            transform=chain_from(config, self.transform, dataset),
            size_schedule=sizes,
        )


def _data(config: RunConfig) -> Dataset:
    dataset = open_data(
        config.data,
        image_size=config.image_size,
        scale=config.scale,
        skip_unreadable=config.skip_unreadable,
        pixels=config.pixels,
    )
    if config.workers > len(dataset.train):
        raise RequestError(
            f"{config.workers} workers cannot share {len(dataset.train)} training images: ask for fewer workers"
        )
    return dataset


def _default_optimizer(strategy: Strategy, workers: int) -> OptimizerConfig:
    """Gives SGD whose learning rate is shared among the updates that the parameters get in one step of all.

    N gradients that are applied one by one are N-1 updates old on average; dividing the rate by that age is the
    rule of Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD", IJCAI 2016.
    """
    usual = SGD()
    return SGD(lr=usual.lr / strategy.shares_rate(workers))


def _made(what: str, spec: Any, *packages: str) -> Config:
    return spec if isinstance(spec, Config) else build(what, str(spec), *packages)


def _is_slow(dataset: Dataset) -> bool:
    """Whether a batch of these data takes work enough to be prepared by a thread of its own."""
    return not isinstance(dataset.train, TensorSplit)
