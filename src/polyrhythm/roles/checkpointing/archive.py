"""Checkpoints of a whole run: every rank's state at one moment, in one file, written in parallel with training.

    coordinator copy ─▶ begin ── train ── train ── look ─▶ CheckpointSaved, or a notice that it could not be written
    thread              └─ write ─ fsync ─ rename ─┘

A copy of the state is saved, which does not change any more. Steps never wait for the disk. At most one write is
running, and the newest checkpoint waits for it: where the disk is slower than the interval, older ones that wait are
left out. The end of the run and an interruption wait until all is written.

A checkpoint can be resumed with another number of workers than it was written by, at any step of an epoch:

    checkpoint      3 workers, in the middle of epoch 2 ─▶ steps that count (by the strategy's rule)
    rest            of epoch 2, image by image          ─▶ divided among 5 (`data/dealing.py`)
    state           parameters, optimizers, servers     ─▶ merged (by the strategy's rule)

Steps are counted again, as by `Calendar`. Workers of the checkpoint keep their batch-norm statistics, and
others get those of worker 0. With another number of servers, the shards are cut again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from polyrhythm.claim import Superseded
from polyrhythm.communication.activity import Activity
from polyrhythm.communication.control_message import checked
from polyrhythm.data.dealer import Dealer
from polyrhythm.data.dealing import Begun
from polyrhythm.data.record import METADATA_KEY, DataRecord
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import CheckpointSaved, Evaluated, Event, Notice
from polyrhythm.roles.checkpointing.model_snapshot import ModelSnapshot
from polyrhythm.roles.checkpointing.worker_state import WorkerState, counted, held_by, server_facts
from polyrhythm.roles.deal import MOST_STEPS, Dealt
from polyrhythm.roles.job import Job
from polyrhythm.specs import build, parse
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.divided_network import HasStages
from polyrhythm.strategies.resharding import Held, Merged, Resharding
from polyrhythm.strategies.state import State, below, prefixed
from polyrhythm.strategies.strategy import RecutsServers, Strategy
from polyrhythm.training.checkpoint import (
    check_numbers,
    checkpoint_path,
    checkpoints,
    forget_beyond,
    keep_best,
    load_checkpoint,
    prune,
    restoring,
    save_checkpoint,
)


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment.

    Attributes:
        epoch: whole epochs done by the coordinator.
        step: steps done by the coordinator.
        seconds: seconds of training so far.
        parameters: `(n,)`, those of the coordinator.
        workers: latest state of every worker that had sent one.
        servers: one state per server.
        average: moving average of the weights, if there is one.
        presented: `(n,)`, the parameters that were tested, where they are neither the coordinator's nor the average.
        begun: progress of other numbers of workers in unfinished epochs.
        deal: record of the drawn batches, where workers draw, as `Dealer` writes it; else empty.
        was: strategy that wrote it, where another resumes; see `handing_over`.
        by: number of workers that wrote it, where another strategy resumes.
        untested: models of earlier steps with unfinished tests.
        tests: results of this session, which the log lacks where the launcher was killed before this rank.
    """

    epoch: int
    step: int
    seconds: float
    parameters: Tensor
    workers: dict[int, WorkerState]
    servers: list[State] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)
    presented: Tensor | None = None
    begun: Begun = field(default_factory=Begun)
    deal: dict[str, Any] = field(default_factory=dict)
    was: Strategy | None = None
    by: int = 0
    untested: list[ModelSnapshot] = field(default_factory=list)
    tests: list[Evaluated] = field(default_factory=list)

    @property
    def tested(self) -> Tensor:
        """Parameters, `(n,)`, of the model that is tested and saved."""
        if self.average:
            return self.average["value"]
        return self.parameters if self.presented is None else self.presented

    def worker(self, index: int, replicated: bool) -> WorkerState:
        """Return a worker's state; where it had sent none, or the part is replicated, that of worker 0 is used."""
        leader = self.workers[0]
        own = replace(self.workers.get(index, leader), begun=self.begun.to_json())
        return replace(own, part=leader.part, part_facts=leader.part_facts) if replicated else own

    def behind(self, workers: int) -> set[int]:
        """Return indices of workers that had done fewer steps than the coordinator, or had sent no state."""
        return {
            index
            for index in range(workers)
            if index not in self.workers or self.workers[index].account.step < self.step
        }

    def has_at_most(self, workers: int, steps: int) -> bool:
        """Return whether no worker has a larger number, and none has done more steps, by servers' counts as well."""
        done = [state.account.step for state in self.workers.values()]
        done += [step for _, facts in self.servers for step in facts.get("steps", ())]
        return all(index < workers for index in self.workers) and all(each <= steps for each in done)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        named = {"parameters": self.parameters}
        for index, worker in self.workers.items():
            named |= prefixed(f"worker.{index}.", worker.tensors())
        for index, (tensors, _) in enumerate(self.servers):
            named |= prefixed(f"server.{index}.", tensors)
        for index, model in enumerate(self.untested):
            named |= prefixed(f"untested.{index}.", model.tensors())
        if self.presented is not None:
            named["presented"] = self.presented
        if self.tests:
            named["tests"] = torch.tensor([_numbers(test) for test in self.tests], dtype=torch.float64)
        return named | prefixed("average.", self.average)

    def facts(self) -> dict[str, Any]:
        """Return all values other than tensors, JSON-able."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "workers": {str(index): worker.facts() for index, worker in self.workers.items()},
            "servers": [facts for _, facts in self.servers],
            "begun": self.begun.to_json(),
            **({"deal": self.deal} if self.deal else {}),
            **({"untested": [[each.epoch, each.step] for each in self.untested]} if self.untested else {}),
        }

    @classmethod
    def of(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Snapshot:
        """Rebuild a snapshot from `tensors` and `facts`.

        Raises:
            RequestError: a value is missing or of another type.
        """
        with restoring("the checkpoint"):
            check_numbers(facts)
            return cls._of(tensors, facts)

    @classmethod
    def _of(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Snapshot:
        workers = {
            int(index): WorkerState.from_tensors(below(f"worker.{index}.", tensors), entry)
            for index, entry in facts["workers"].items()
        }
        servers = [
            (below(f"server.{index}.", tensors), server_facts(entry))
            for index, entry in enumerate(facts["servers"])
        ]
        return cls(
            counted(facts["epoch"]),
            counted(facts["step"]),
            checked(facts["seconds"], float),
            tensors["parameters"],
            workers,
            servers,
            below("average.", tensors),
            tensors.get("presented"),
            Begun.from_json(facts.get("begun", {})),  # older checkpoints had none
            facts.get("deal", {}),
            untested=[
                ModelSnapshot.of(counted(epoch), counted(step), below(f"untested.{index}.", tensors))
                for index, (epoch, step) in enumerate(facts.get("untested", []))
            ],
            tests=[_test_of(*numbers) for numbers in tensors["tests"].tolist()] if "tests" in tensors else [],
        )


def _numbers(test: Evaluated) -> tuple[float, ...]:
    return test.epoch, test.step or 0, test.test_loss, test.test_top1, test.test_top5


def _test_of(epoch: float, step: float, loss: float, top1: float, top5: float) -> Evaluated:
    return Evaluated(
        time_s=0,
        epoch=counted(int(epoch)),
        step=counted(int(step)),
        test_loss=loss,
        test_top1=top1,
        test_top5=top5,
        snapshot_s=0,
    )


FOLDER = "checkpoints"
_MOST_WORKERS = 100_000
"""Limit of a checkpoint's workers; its state is merged worker by worker."""


class Archive:
    """Checkpoints of a run folder.

    Args:
        job: training job; a checkpoint of another job is refused.

    Attributes:
        remarks: remarks on the checkpoint that was loaded.
        name: name of the place, for messages.
        keeps_best: whether the checkpoint of the highest test accuracy is kept as well.
        awaited: steps with a checkpoint that may be the best, as is known after the test.
    """

    name = "the disk"
    awaited: frozenset[int] = frozenset()

    def __init__(self, job: Job) -> None:
        assert job.checkpointing.folder is not None
        self._folder: Path = job.checkpointing.folder / FOLDER
        self._keep = job.checkpointing.checkpoints
        self._claim = job.checkpointing.claim
        self.keeps_best = job.checkpointing.best
        self._job = job
        self._identity = identity(job)
        self.remarks: list[str] = []

    def save(self, snapshot: Snapshot) -> str:
        """Write a checkpoint, and remove old ones when it is whole; return its path inside the run folder.

        Raises:
            RunError: it cannot be written; older ones are untouched.
            Superseded: the folder belongs to a later run.
        """
        path = checkpoint_path(self._folder, snapshot.step)
        try:
            self._claim.draft(path)  # it makes a deleted folder again
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write checkpoint {path}: {error.strerror or error}") from error
        record = DataRecord.of(self._job.dataset).to_json()
        facts = {"job": self._identity, METADATA_KEY: record, **snapshot.facts()}
        save_checkpoint(path, snapshot.tensors(), facts, self._claim)
        forget_beyond(self._folder, snapshot.step, self._claim)
        prune(self._folder, self._keep, self._claim, self.awaited)
        return f"{FOLDER}/{path.name}"

    def keep_best(self, step: int, top1: float) -> None:
        """Keep the checkpoint of a step in addition to the newest ones, if that is enabled and it is the best so far.

        Raises:
            RunError: the system could not do so.
            Superseded: the folder belongs to a later run.
        """
        if self.keeps_best:
            keep_best(checkpoint_path(self._folder, step), top1, self._claim)

    def load(self) -> Snapshot:
        """Read the newest undamaged checkpoint; newer damaged ones are removed when the next one is written.

        A checkpoint of another strategy is returned unchanged, with `was`.

        Raises:
            RequestError: there is none, all are damaged, it is of another job, or it is of another number of workers
                and the strategy needs the same number.
        """
        with restoring(f"the checkpoint in {self._folder}"):
            return self._load()

    def _load(self) -> Snapshot:
        path, tensors, facts = self._newest_whole()
        if METADATA_KEY in facts:  # older checkpoints had none
            DataRecord.from_json(facts[METADATA_KEY], str(path)).continued(self._job.dataset, str(path))
        stated = facts.get("job")
        if isinstance(stated, dict):
            stated.setdefault(_LABEL_SKEW, "none")  # older checkpoints had none
        if not (
            isinstance(stated, dict)
            and all(type(stated.get(key)) is type(value) for key, value in self._identity.items())
            and 0 < stated["workers"] <= _MOST_WORKERS
        ):
            raise RequestError(f"{path} does not record what it was trained with: take another checkpoint")
        before = stated["workers"]
        resharding = before != self._job.workers
        was = other_strategy(self._job, facts["job"]["strategy"])
        for key, value in self._identity.items():
            served = key == "strategy" or (key == "optimizer" and was is not None)
            slower = key == "optimizer" and differ_by_rate(facts["job"][key], value)
            if facts["job"][key] != value and key != "workers" and not (served or slower):
                raise RequestError(
                    f"{path} was trained with {key} {facts['job'][key]}, not {value}: resume with that"
                )
        snapshot = Snapshot.of(tensors, facts)
        if not snapshot.has_at_most(
            before, (len(self._job.dataset.train) + 1) * (1 + self._epochs(snapshot))
        ):
            raise RequestError(f"{path} has more workers or steps than its run can have had: take another")
        _check_whole(snapshot, was or self._job.strategy, before)
        if was is not None:
            return replace(snapshot, was=was, by=before)
        if bool(snapshot.deal) is not self._job.draws:
            used, wanted = ("dynamic", "static") if snapshot.deal else ("static", "dynamic")
            raise RequestError(f"{path} was trained with --batches {used}, not {wanted}: resume with that")
        if len(snapshot.servers) != self._job.traits.servers:
            self.remarks.append(recutting_notice(self._job, snapshot.servers))
        if not resharding:
            strategy = self._job.strategy
            cuts_again = isinstance(strategy, HasStages) and strategy.cuts_again
            return _joined(snapshot, self._job) if cuts_again else snapshot
        snapshot, remark = resharded(snapshot, self._job, before)
        self.remarks.append(remark)
        return snapshot

    def _epochs(self, snapshot: Snapshot) -> int:
        """Return the epochs that the run may have been begun for."""
        return max(self._job.learning.planned_epochs, snapshot.epoch)

    def _newest_whole(self) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        found = checkpoints(self._folder)
        if not found:
            raise RequestError(f"there is no checkpoint in {self._folder}: start a new run")
        damaged: RequestError | None = None
        for path in found:
            try:
                tensors, facts = load_checkpoint(path)
            except RequestError as error:
                damaged = damaged or error
                continue
            if damaged is not None:
                self.remarks.append(
                    f"{damaged}, and the run continues from that: epoch {facts['epoch']}, step {facts['step']}"
                )
            return path, tensors, facts
        assert damaged is not None
        raise damaged


def _check_whole(snapshot: Snapshot, strategy: Strategy, workers: int) -> None:
    """Check that the parts of a snapshot fit together.

    Args:
        snapshot: snapshot as it was read.
        strategy: strategy that wrote it.
        workers: number of workers that wrote it.

    Raises:
        ValueError: they do not.
    """
    size, dtype = len(snapshot.parameters), snapshot.parameters.dtype
    if snapshot.presented is not None and snapshot.presented.shape != (size,):
        raise ValueError(f"{snapshot.presented.numel():,} parameters were tested, not {size:,}")
    place = 0
    for tensors, _ in snapshot.servers:
        values = tensors.get("values")
        if values is None:
            continue
        place += len(values)
        if values.ndim != 1 or values.dtype != dtype or place > size:
            raise ValueError(f"the shards of its servers are not the {size:,} parameters")
        place %= size
    if place:
        raise ValueError(f"the shards of its servers are not the {size:,} parameters")
    traits = strategy.traits(workers)
    apart = any(state.account.step != snapshot.step for state in snapshot.workers.values())
    if apart and traits.lockstep and not traits.servers:
        raise ValueError("its workers have done different numbers of steps")


_LABEL_SKEW = "label skew"


def identity(job: Job) -> dict[str, Any]:
    """Return the properties that identify a job, JSON-able."""
    skew = job.learning.label_skew
    return {
        "strategy": str(job.strategy),
        "workers": job.workers,
        "data": job.dataset.name,
        "model": job.model_name,
        "optimizer": str(job.learning.optimizer),
        "batch size": job.learning.batch_size,
        "batch schedule": str(job.learning.batch_schedule),
        "seed": job.learning.seed,
        _LABEL_SKEW: "none"
        if skew is None
        else f"{skew.alpha:g}" + (f" of {skew.clients} clients" if skew.clients else ""),
    }


class Saved(Protocol):
    """State of a run at one moment, as far as its writer announces it."""

    @property
    def epoch(self) -> int:
        """Whole epochs done by the coordinator."""

    @property
    def step(self) -> int:
        """Steps done by the coordinator."""


_Saved = TypeVar("_Saved", bound=Saved)
_Saved_contra = TypeVar("_Saved_contra", bound=Saved, contravariant=True)


class Storage(Protocol[_Saved_contra]):
    """Place of checkpoints; see `Archive`.

    Attributes:
        name: name of the place, for messages.
        keeps_best: whether the checkpoint of the highest test accuracy is kept as well.
    """

    name: str
    keeps_best: bool

    def save(self, snapshot: _Saved_contra) -> str:
        """Write a checkpoint, whole or not at all; return its path."""

    def keep_best(self, step: int, top1: float) -> None:
        """Keep the checkpoint of a step in addition to the newest ones, if it is the best so far."""


class Archivist(Generic[_Saved]):
    """Saves one checkpoint after the other. A failed write is reported, and training continues.

    Only where a later run has taken the folder, all methods that check finished writes raise `Superseded`.

    Args:
        archive: place to write to.
        activity: activity of the rank, for its watchdog.
        emit: receiver of events, which sets their times; called on the thread of the caller.
        beside: whether to write on a background thread; in virtual time, where writing takes none, it is done
            at once.
    """

    def __init__(
        self, archive: Storage[_Saved], activity: Activity, emit: Callable[[Event], None], *, beside: bool
    ) -> None:
        self._archive = archive
        self._activity = activity
        self._emit = emit
        self._beside = beside
        self._writing: tuple[_Saved, float | None, Future[str]] | None = None
        self._waiting: tuple[_Saved, float | None] | None = None
        self._reported_delay = self._fails = False
        self._saved_step: int | None = None  # of the last one, if it was written

    def begin(self, snapshot: _Saved, top1: float | None = None) -> None:
        """Begin to write a checkpoint, or let it wait until the one before is done.

        Args:
            snapshot: state that does not change any more.
            top1: test accuracy of the model, a fraction, if it was tested.
        """
        self.look()
        if self._writing is not None:
            self._postpone(snapshot, top1)
            return
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = snapshot, top1, thread.submit(self._archive.save, snapshot)
        thread.shutdown(wait=False)  # ends with its only work, which the interpreter's end waits for
        if not self._beside:
            self.wait()

    def look(self) -> None:
        """Report the result of the current write, if it is done, and begin the next."""
        if self._writing is not None and self._writing[-1].done():
            self._report()

    def wait(self) -> None:
        """Wait until all checkpoints are written."""
        while self._writing is not None:
            with self._activity.doing("writing a checkpoint", takes_long=True):
                self._writing[-1].exception()
            self._report()

    def tested(self, top1: float) -> None:
        """Record the test accuracy, a fraction, of the model saved last, and keep its checkpoint if it is the best."""
        self.wait()
        self._keep_best(top1)

    def rate(self, step: int, top1: float) -> None:
        """Record the test accuracy, a fraction, of a model that was saved before the end of its test."""
        self.look()
        if self._writing is not None and self._writing[0].step == step:
            self._writing = self._writing[0], top1, self._writing[-1]
        elif self._waiting is not None and self._waiting[0].step == step:
            self._waiting = self._waiting[0], top1
        else:
            self._keep_best(top1, step)

    def _keep_best(self, top1: float, step: int | None = None) -> None:
        step = self._saved_step if step is None else step
        if step is not None:
            try:
                self._archive.keep_best(step, top1)
            except Superseded:
                raise
            except RunError as error:
                self._emit(Notice(time_s=0, text=str(error)))

    def _postpone(self, snapshot: _Saved, top1: float | None) -> None:
        """Let a checkpoint wait for the disk instead of the one that waits, unless that may be the best."""
        before, self._waiting = self._waiting, (snapshot, top1)
        if before is None:
            return
        if self._archive.keeps_best and before[1] is not None and (top1 is None or top1 <= before[1]):
            self._waiting, before = before, self._waiting
        if not self._reported_delay:
            self._reported_delay = True
            text = (
                f"{self._archive.name} is slower than the interval between checkpoints: that of step "
                f"{before[0].step} is skipped there; a longer interval writes all"
            )
            self._emit(Notice(time_s=0, text=text))

    def _report(self) -> None:
        assert self._writing is not None
        (snapshot, top1, future), self._writing, self._saved_step = self._writing, None, None
        try:
            path = future.result()
        except Superseded:
            raise
        except RunError as error:  # anything else is a bug
            if not self._fails:
                self._emit(Notice(time_s=0, text=f"{error}, and training continues"))
            self._fails = True
            self._begin_waiting()
            return
        self._fails = False
        self._saved_step = snapshot.step
        self._emit(CheckpointSaved(time_s=0, path=path, epoch=snapshot.epoch, step=snapshot.step))
        if top1 is not None:
            self._keep_best(top1)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.begin(*waiting)


def _joined(snapshot: Snapshot, job: Job) -> Snapshot:
    """Return a checkpoint in which workers receive the states of all, since they may train other layers than before."""
    states = snapshot.workers
    held = held_by(states, job.workers, snapshot.parameters, snapshot.servers)
    given = job.strategy.resharding(job.workers, job.workers).worker_states(held, snapshot.step)
    workers = {
        index: replace(state, part=given[index][0], part_facts=given[index][1])
        for index, state in states.items()
    }
    return replace(snapshot, workers=workers)


def resharded(snapshot: Snapshot, job: Job, before: int) -> tuple[Snapshot, str]:
    """Return a checkpoint as if the job's number of workers had written it, and a remark on the change.

    Args:
        snapshot: checkpoint of `before` workers.
        job: job that resumes.
        before: previous number of workers.

    Raises:
        RequestError: the strategy needs the same number of workers as before.
    """
    if job.learning.updates is not None:
        raise RequestError(
            f"{before} workers have begun this run of {job.learning.updates} updates, and other workers take other "
            f"steps: resume with --workers {before}, or give --epochs in place of --updates"
        )
    rule = job.strategy.resharding(before, job.workers)
    old = replace(job, workers=before, begun=snapshot.begun)
    held, steps = counted_steps(snapshot, old, rule)
    rest = dealt_out(snapshot, old, job, held, steps)
    states = snapshot.workers
    merged = rule.merged(held, rest.step)
    found = replace(
        snapshot,
        epoch=rest.epoch,
        step=rest.step,
        parameters=merged.held.parameters,
        workers={index: _state(index, rest.step, states, merged) for index in range(job.workers)},
        servers=merged.held.servers,
        begun=rest.begun,
        deal=rest.deal,
    )
    return found, _notice(job.continued(rest.begun), before, merged, rest, buffers=bool(states[0].buffers))


def counted_steps(snapshot: Snapshot, old: Job, rule: Resharding) -> tuple[Held, list[int]]:
    """Return the strategy's state in a checkpoint, and the number of each worker's steps that count.

    Args:
        snapshot: checkpoint.
        old: job that wrote it.
        rule: resharding rule of its strategy.
    """
    held = held_by(snapshot.workers, old.workers, snapshot.parameters, snapshot.servers)
    return held, rule.counted(held)


@dataclass(frozen=True)
class Rest:
    """Rest of a run, for the workers that resume it.

    Attributes:
        epoch: whole epochs that are done.
        step: first step of all workers.
        begun: progress of other numbers of workers in unfinished epochs.
        deal: record of the drawn batches, as `Dealer` writes it, where workers draw; else empty.
        text: description of the unfinished epoch; empty between two.
    """

    epoch: int
    step: int
    begun: Begun
    deal: dict[str, Any]
    text: str


def dealt_out(snapshot: Snapshot, old: Job, job: Job, held: Held, steps: Sequence[int]) -> Rest:
    """Divide the rest of a run's images among the present number of workers.

    Args:
        snapshot: checkpoint.
        old: job that wrote it.
        job: job that resumes.
        held: strategy's state in the checkpoint.
        steps: number of each worker's steps that count.

    Raises:
        RequestError: an epoch is unfinished, and its images were drawn and are to be shared out now, or vice versa.
    """
    dealt = Dealt(old.dealer(snapshot.deal), old.units) if old.draws else None
    left_out = snapshot.begun.left_out + _images_left_out(old, held, dealt)
    if dealt is None:
        begun = Begun(old.calendar.begun_with(steps), left_out)
        first = min(begun.epochs, default=old.calendar.epoch_of(min(steps)))
        epochs = sorted(begun.epochs)
    else:
        begun = Begun(left_out=left_out)
        free = dealt.dealer.left([steps[unit[0]] for unit in old.units])
        first = next((epoch for epoch, ranges in free.items() if ranges), len(free))
        deck = job.continued(begun).deck
        epochs = [epoch for epoch, ranges in free.items() if ranges not in ([], [(0, deck.images[epoch])])]
    lost = ""
    if epochs and old.draws is not job.draws and epochs[-1] < snapshot.epoch:
        # Gradients of finished epochs that servers held, or that worker 0 did not know of.
        count = (
            sum(stop - start for epoch in epochs for start, stop in free[epoch])
            if dealt is not None
            else sum(job.continued(begun).calendar.images_left(epoch) for epoch in epochs)
        )
        begun, first, epochs = Begun(left_out=left_out + count), snapshot.epoch, []
        lost = f"{count} images with gradients that no other rank has received are dropped"
    if epochs and old.draws is not job.draws:
        raise RequestError(
            f"epoch {first + 1} is unfinished, and its batches were {'dynamic' if old.draws else 'static'}, as they "
            f"are not with {job.strategy}: resume with {old.strategy} to the end of an epoch"
            + ("" if old.draws else ", or give --batches static")
        )
    new = job.continued(begun)
    if dealt is None or not epochs:
        left = sum(new.calendar.images_left(epoch) for epoch in epochs)
        free = {
            epoch: [(0, images)] if epoch >= first else [] for epoch, images in enumerate(new.deck.images)
        }
    else:
        left = sum(stop - start for epoch in epochs for start, stop in free[epoch])
    step, deal = new.calendar.start(first), {}
    if new.draws:
        sizes, same = [len(unit) for unit in new.units], [step] * len(new.units)
        deal = Dealer(new.deck, sizes, steps=same, begun=free).to_json()
    text = lost
    if epochs:
        of = f"epoch {first + 1}" if len(epochs) == 1 else f"epochs {first + 1} to {epochs[-1] + 1}"
        text = f"the {left} remaining images of {of} are divided among them"
    return Rest(first, step, begun, deal, text)


def _state(index: int, step: int, states: dict[int, WorkerState], merged: Merged) -> WorkerState:
    own = states.get(index, states[0])
    counted = own.account.staleness if index in states else {}
    account = replace(own.account, worker=index, step=step, staleness=counted, stopped=False, final=False)
    part, facts = merged.held.workers.get(index, ({}, {}))
    return replace(own, account=account, part=part, part_facts=facts)


def _images_left_out(job: Job, held: Held, dealt: Dealt | None) -> int:
    """Count the images of steps that count as done although servers applied no gradient of them."""
    images_of = job.calendar.images if dealt is None else dealt.images
    most = job.calendar.total_steps if dealt is None else MOST_STEPS
    images = sum(
        images_of(step, int(pusher))
        for _, facts in held.servers
        for pusher, stretches in facts.get("left_out", {}).items()
        for first, after in stretches
        for step in range(first, min(after, most))
    )
    return round(images / max(1, len(held.servers)))


def _notice(job: Job, before: int, merged: Merged, rest: Rest, *, buffers: bool) -> str:
    """Describe the changes to the workers' states, and to the epoch."""
    more, gone = max(0, job.workers - before), max(0, before - job.workers)
    new = f"; of batch-norm statistics, {more} new ones have worker 0's" if more and buffers else ""
    left = f"; the batch-norm statistics of {gone} are dropped" if gone and buffers else ""
    dealt = f"; {rest.text}" if rest.text else ""
    size = job.calendar.batch_size(rest.epoch)
    return (
        f"resumed with {job.workers} workers in place of {before}: {merged.text}{new}{left}{dealt}; a step now has "
        f"{job.workers * size} images"
    )


def other_strategy(job: Job, before: str) -> Strategy | None:
    """Return the previous strategy, given as text, that the job's replaces; None where it is the same.

    Raises:
        RequestError: the strategy does not exist any more.
    """
    if str(job.strategy) == before:
        return None
    try:
        found = build("strategy", before, *FAMILIES)
    except RequestError as error:
        raise RequestError(f"the checkpoint was written by {before}, and {error}") from None
    assert isinstance(found, Strategy)
    if isinstance(job.strategy, RecutsServers) and job.strategy.continues_from(found):
        return None
    return None if job.strategy == found else found


def differ_by_rate(before: str, now: str) -> bool:
    """Whether two optimizer specs are equal except for the learning rate, on which no optimizer state depends."""
    was, wanted = parse(before), parse(now)
    return replace(was, arguments={**was.arguments, "lr": None}) == replace(
        wanted, arguments={**wanted.arguments, "lr": None}
    )


def recutting_notice(job: Job, states: Sequence[State]) -> str:
    """Describe the changes to the servers' states."""
    columns = zip(*(facts["steps"] for _, facts in states), strict=True)
    apart = sum(max(steps) - min(steps) for steps in columns)
    merged = "" if not apart else f"; {apart} gradients that not all servers had yet count as applied"
    return (
        f"resumed with {job.traits.servers} servers in place of {len(states)}: the shards are divided again, with "
        f"the optimizers' states{merged}"
    )
