"""Events of a run: frozen, small, one JSON object per line in `events.jsonl`.

All readers (live progress, TensorBoard, the report) use only these, so a real run, a simulated one and a replayed one
look alike. Times are seconds on the run's own clock, which starts at 0 when training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

Check = Callable[[Any], bool]
"""Whether a value read from JSON is of a kind."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event with its time.

    Attributes:
        time_s: seconds since training started, on the run's clock.
    """

    time_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON-able dict; `event` is its class name."""
        return {"event": type(self).__name__, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training starts.

    Attributes:
        strategy: spec of the strategy, as text.
        data: name of the data.
        model: name of the model.
        workers: number of workers.
        servers: number of servers.
        epochs: epochs to train.
        steps_per_epoch: steps of every worker in an epoch, in the first one if epochs differ.
        start_epoch: epochs that the resumed run had completed.
        steps: total steps of every worker; 0 if all epochs have `steps_per_epoch`.
        start_step: steps before the first epoch of this run; 0 if all epochs have `steps_per_epoch`.
        earlier_s: seconds of training of the resumed run.
        parameters: number of trained parameters of the model.
        free_running: whether the strategy is asynchronous: no worker waits for a slower one.
        begun: progress in unfinished epochs that began with another number of workers; empty if there is none.
        deal: state of the dynamic batches (`Dealer`) when this run starts; empty with static batches.
        images: images of the whole run with dynamic batches, where workers take different numbers of steps; else 0.
        images_before: images that count as done when a resumed run starts; None if unknown.
        resumed_step: steps that the coordinator had done in the checkpoint that is resumed; None: there is none.
        threads: compute threads of each rank, where all are on one host; 0: unknown, or in virtual time.
        cores: cores of that host.
    """

    strategy: str
    data: str
    model: str
    workers: int
    servers: int
    epochs: int
    steps_per_epoch: int
    start_epoch: int = 0
    parameters: int = 0
    steps: int = 0
    start_step: int = 0
    earlier_s: float = 0.0
    free_running: bool = False
    begun: dict[str, Any] = field(default_factory=dict)
    deal: dict[str, Any] = field(default_factory=dict)
    images: int = 0
    images_before: int | None = None
    resumed_step: int | None = None
    threads: int = 0
    cores: int = 0


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The model was tested.

    Attributes:
        epoch: epochs done.
        test_loss: mean cross-entropy.
        test_top1: fraction of test images with a correct most likely class.
        test_top5: fraction of test images with the correct class among the five most likely.
        step: steps that worker 0 had done; None in older logs, and where it is not known.
        snapshot_s: time of the tested model, where steps continued during the test; None: they did not.
    """

    epoch: int
    test_loss: float
    test_top1: float
    test_top5: float
    step: int | None = None
    snapshot_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """A user's own loop has something to log.

    Attributes:
        worker: index among the workers, from 0.
        step: steps that it has done since the run began.
        values: numbers by name.
    """

    worker: int
    step: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk.

    Attributes:
        path: path of the file, inside the run folder.
        epoch: epochs done.
        step: steps that worker 0 had done.
    """

    path: str
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Training is over.

    Attributes:
        outcome: `done`, `interrupted` or `failed`.
        result: the figures of the run, as `train --json` prints them.
    """

    outcome: str
    result: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WorkerProgress(Event):
    """Progress of one worker since its last such event.

    Attributes:
        worker: index among the workers, from 0.
        epoch: the current epoch, from 0.
        step: steps done since the run began (over all epochs).
        steps: steps done since the last such event.
        images: images seen since the last such event.
        loss: mean training loss of those images.
        learning_rate: current learning rate.
        wait_s: seconds of this period in which the worker waited for others.
        stage_s: seconds of `wait_s` spent waiting for other stages of a pipeline.
        exchange_s: seconds of `wait_s` for the exchanges alone, without waiting for slower workers: low waits of single
            steps, times the steps. 0: unknown.
        exchange_processor_s: seconds of `exchange_s` in which it was ready to run, and the processor was busy with
            other processes.
        processor_s: seconds of this period, without `wait_s`, in which it was ready to run, and the processor was busy
            with other processes.
    """

    worker: int
    epoch: int
    step: int
    steps: int
    images: int
    loss: float
    learning_rate: float
    wait_s: float = 0.0
    stage_s: float = 0.0
    exchange_s: float = 0.0
    exchange_processor_s: float = 0.0
    processor_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerTimings(Event):
    """Breakdown of one worker's step time since its last such event; emitted only with `timings`.

    Attributes:
        worker: index among the workers, from 0.
        step: steps done since the run began.
        steps: number of steps in this period.
        data_s: seconds of waiting for a batch.
        forward_s: seconds of forward passes, with the transfer of the batch to the device.
        backward_s: seconds of backward passes.
        update_s: seconds of the optimizer and of the strategy's arithmetic, with work that servers leave to workers.
        communication_s: seconds inside the communicator, waiting for other ranks included.
        other_s: seconds of the rest of the steps.
        in_step: whether the strategy is lockstep.
        communication: (step, seconds) of each step, if so; else empty.
        spans: (name, start, end) in seconds since training started, of the first steps of a real run.
    """

    worker: int
    step: int
    steps: int
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    communication_s: float = 0.0
    other_s: float = 0.0
    in_step: bool = False
    communication: list[list[float]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CacheUsed(Event):
    """Use of a worker's image cache since its last such event; emitted only if there is a cache.

    Attributes:
        worker: index among the workers, from 0.
        images: images requested; a few more than it has trained on if batches are prepared ahead.
        hits: number of these that were in the cache.
        kept_bytes: bytes in the cache now; ranks of one host may share it.
    """

    worker: int
    images: int
    hits: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class InputWaited(Event):
    """A worker has waited for batches since its last such event.

    Attributes:
        worker: index among the workers, from 0.
        seconds: seconds of waiting between steps.
        busy_s: processor time of all threads of its process while it waited, in tests as well: much of it if images are
            decoded and augmented, little if they are read.
        testing_s: seconds of waiting for the images of tests.
    """

    worker: int
    seconds: float
    busy_s: float
    testing_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NoiseMeasured(Event):
    """How a worker's gradients differ from the mean of all, since its last such event; see `training/noise_scale.py`.

    Attributes:
        step: steps done since the run began.
        measured: steps in which they were compared.
        noise: sum over these of estimates of the trace of the covariance of one image's gradient.
        signal: sum of estimates of the square of the gradient of all images.
        images: images in a step of all workers.
    """

    step: int
    measured: int
    noise: float
    signal: float
    images: int


@dataclass(frozen=True, kw_only=True)
class BatchesDrawn(Event):
    """A worker, or a group of workers, has drawn its next batches, or given some back; see `data.dealer.Grant`.

    Places drawn minus places given back are every place of every epoch once. A replacement may begin at another step.

    Attributes:
        unit: index of the worker, or of the group.
        step: steps of the unit before these batches.
        epoch: epoch of the order.
        start: first place in that order.
        stop: place after the last one.
        batches: number of batches; 0 where these places are given back, since the worker has failed.
        reached: images of the run that all workers will have done before the first of them.
        until: images of the run that all workers will have done after the last of them.
    """

    unit: int
    step: int
    epoch: int
    start: int
    stop: int
    batches: int
    reached: int = 0
    until: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerProgress(Event):
    """Progress of one server since its last such event.

    Attributes:
        server: index among the servers, from 0.
        version: updates applied to its shard since the run began.
        staleness: number of gradients applied at each staleness, since the last such event.
        seconds: length of the period since the last such event.
        busy_share: fraction of those seconds in which it did not wait for messages.
        queue: mean number of messages, at each receive, that were waiting; 1: never more than one.
        dropped: late gradients since the run began.
        updating_s: seconds of this period spent on messages: reading them, updating, making answers.
        held_s: seconds that workers' gradients which are answered now had waited here for others', added up.
    """

    server: int
    version: int
    staleness: dict[int, int]
    seconds: float = 0.0
    busy_share: float = 0.0
    queue: float = 0.0
    dropped: int = 0
    updating_s: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker is lost; the others continue.

    Attributes:
        worker: index among the workers, from 0.
        rank: rank of the process.
        step: steps that it was known to have done since the run began; the servers may hold a few more.
    """

    worker: int
    rank: int
    step: int

    @property
    def text(self) -> str:
        """The event as a sentence."""
        return f"worker {self.worker} (rank {self.rank}) is lost (last report: step {self.step}), the others continue"


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """The replacement of a failed worker has joined.

    Attributes:
        worker: index among the workers, from 0.
        rank: rank of the process.
    """

    worker: int
    rank: int

    @property
    def text(self) -> str:
        """The event as a sentence."""
        return f"a replacement of worker {self.worker} (rank {self.rank}) has joined"


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something that the user should know; training continues."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ImagesLeftOut(Notice):
    """Unreadable images are excluded from training or from a test.

    Attributes:
        files: names, one line each.
    """

    files: list[str]

    @classmethod
    def of_worker(cls, worker: int, files: list[str], time_s: float = 0.0) -> ImagesLeftOut:
        """Return the event of a worker that could not read these files; its text names up to 100 of them."""
        named, more = ", ".join(files[:_MOST_NAMED]), len(files) - _MOST_NAMED
        count = f"{len(files):,} image{'s' * (len(files) != 1)}"
        text = f"worker {worker}: {count} left out, since unreadable: {named}"
        return cls(time_s=time_s, text=text + (f" and {more:,} more" if more > 0 else ""), files=files)


_MOST_NAMED = 100


@dataclass(frozen=True, kw_only=True)
class BatchesBalanced(Event):
    """Synchronous workers have new shares of the global batch from now on.

    Attributes:
        step: steps done.
        sizes: images of each worker in a full global batch, by its index; 0: it is absent, or of another group.
    """

    step: int
    sizes: list[int]


@dataclass(frozen=True, kw_only=True)
class Straggler(Notice):
    """A worker has become a straggler, or is no longer one, according to the text.

    Attributes:
        worker: index among the workers, from 0.
        slowdown: step time divided by the median of all workers.
    """

    worker: int
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class StateDiffers(Notice):
    """Workers that must hold the same parameters and optimizer state differ; from the next view on they are equal.

    Attributes:
        workers: indices of the differing workers; of all workers where no majority is equal.
        after_step: steps done when all were last known to be equal; None: never.
        step: steps done when they were found to differ.
        returned_to: steps done in the state to which all return; None: the workers receive another worker's state.
    """

    workers: list[int]
    after_step: int | None
    step: int
    returned_to: int | None

    @staticmethod
    def sentence(workers: Sequence[int], after_step: int | None, step: int, returned_to: int | None) -> str:
        """Return the event as a sentence; see the attributes."""
        names = f"worker{'s' * (len(workers) > 1)} {' and '.join(map(str, workers))}"
        when = f"between steps {after_step or 0} and {step}"
        if returned_to is not None:
            return (
                f"{names} began to differ {when}, and no majority shows which is right: "
                f"all return to the state after step {returned_to}"
            )
        return (
            f"{names} began to differ from the others {when}, by a flipped bit or by arithmetic: "
            f"{'they receive' if len(workers) > 1 else 'it receives'} the state of another worker"
        )


@dataclass(frozen=True, kw_only=True)
class ServerLost(Notice):
    """A server is lost; the replicas of its shards take over.

    Attributes:
        rank: rank of the process.
    """

    rank: int


@dataclass(frozen=True, kw_only=True)
class ServerJoined(Notice):
    """The replacement of a failed server has all of its shards, so the run survives another failure.

    Attributes:
        rank: rank of the process.
    """

    rank: int


@dataclass(frozen=True, kw_only=True)
class Restarted(Notice):
    """All ranks are started again, after the loss of one that the run cannot continue without.

    Attributes:
        updates_lost: workers' steps that are known to have been done since the checkpoint.
    """

    updates_lost: int


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        WorkerProgress,
        WorkerTimings,
        CacheUsed,
        InputWaited,
        NoiseMeasured,
        BatchesDrawn,
        ServerProgress,
        Evaluated,
        Logged,
        CheckpointSaved,
        WorkerLost,
        WorkerJoined,
        Notice,
        ImagesLeftOut,
        Straggler,
        StateDiffers,
        ServerLost,
        ServerJoined,
        Restarted,
        BatchesBalanced,
        RunEnded,
    )
}

_MOST = 2**63
"""Limit of whole numbers: larger ones overflow where they are computed with."""


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_whole(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_object(value: Any) -> bool:
    return type(value) is dict


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _object_of(check: Check) -> Check:
    return lambda value: type(value) is dict and all(map(check, value.values()))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_span(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) == 3
        and _is_text(value[0])
        and all(map(_is_number, value[1:]))
    )


def _is_pair(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_class_row(value: Any) -> bool:
    if type(value) is not dict:
        return False
    return all(
        _is_pair(each) if name == "recall_interval" else not isinstance(each, list | dict)
        for name, each in value.items()
    ) and ("recall_interval" not in value or "recall" in value)


_CHECKS: dict[str, Check] = {
    "int": _is_whole,
    "float": _is_number,
    "bool": lambda value: type(value) is bool,
    "str": _is_text,
    "int | None": _or_none(_is_whole),
    "float | None": _or_none(_is_number),
    "dict[str, Any]": _is_object,
    "dict[str, float]": _object_of(lambda value: _is_number(value) or type(value) is bool),
    "dict[int, int]": _object_of(_is_whole),
    "list[int]": _list_of(_is_whole),
    "list[str]": _list_of(_is_text),
    "list[list[float]]": _list_of(_is_pair),
    "list[list[Any]]": _list_of(_is_span),
}
"""By a field's type; lists of lists are those of `WorkerTimings`."""

_FIELDS = {kind: {each.name: _CHECKS[str(each.type)] for each in fields(kind)} for kind in _KINDS.values()}

_RESULT: dict[str, Check] = {
    **dict.fromkeys(("strategy", "data", "model", "error", "parameters_sha256"), _is_text),
    **dict.fromkeys(("workers", "servers", "test_images", "parameters"), _is_whole),
    **dict.fromkeys(
        (
            "seconds", "epochs", "steps", "images_per_s", "sustained_images_per_s", "train_loss", "test_loss",
            "test_top1", "test_top5", "waiting_share", "bytes_sent_per_step", "energy_j", "gpu_energy_j",
            "workers_lost", "workers_joined", "workers_ejected", "images_not_seen", "images_unreadable",
            "gradients_dropped", "gradients_not_finite", "states_differed", "price",
        ),
        _is_number,
    ),
    "test_top1_interval": _is_pair,
    "staleness": lambda value: (
        _is_object(value) and all(_is_number(value.get(key, 0)) for key in ("mean", "max"))
    ),
    "messages_refused": _object_of(_is_whole),
    "confusion": _list_of(_list_of(_is_number)),
    "per_class": lambda value: _is_object(value) or _list_of(_is_class_row)(value),
}  # fmt: skip
"""Kinds of the figures of a run that readers compute with; others are shown as they are."""


def check_result(result: dict[str, Any]) -> None:
    """Check the figures of a run.

    Raises:
        ValueError: one is of another kind than `train --json` has it.
    """
    for name, value in result.items():
        check = _RESULT.get(name)
        if check is not None and value is not None and not check(value):
            raise ValueError(f"its {name} is {value!r:.50}")


def from_json(record: dict[str, Any]) -> Event:
    """Inverse of `Event.to_json`.

    Raises:
        ValueError: the record names no known event, lacks one of its fields, or has a value of another type.
    """
    name = record.get("event", "")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"no such event: {name!r:.50}")
    checks = _FIELDS[kind]
    values = {name: value for name, value in record.items() if name in checks}
    for name, value in values.items():
        if not checks[name](value):
            raise ValueError(f"{kind.__name__}: its {name} is {value!r:.50}")
    if "staleness" in values:
        values["staleness"] = {int(key): int(count) for key, count in values["staleness"].items()}
    if kind is RunEnded and "result" in values:
        check_result(values["result"])
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
