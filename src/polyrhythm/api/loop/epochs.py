"""The epochs of a worker's loop, and how workers enter them: when a run begins, and as replacements.

A worker may fail in the middle of an epoch, and its replacement starts the script again:

    worker 0   ◇ epoch 3 ──────────────────── ◇ epoch 4
    worker 1   ◇ epoch 3 ─── ✝  ▷ a new share ◇ epoch 4        in lockstep: all divide the rest again (`Divisions`)
    worker 1   ◇ epoch 3 ─── ✝  ▷ its rest ── ◇ epoch 4        asynchronous
    worker 1   ◇ epoch 3 ─── ✝              ▷ ◇ epoch 4        in lockstep, where batches cannot be dealt again

The first worker at the beginning of an epoch (◇) posts a mark for all: the workers that have a share
of it, and the position of the loop. So all divide it alike, though they learn of a failure at different moments, and
no worker waits for another.

`EpochProgress` counts how much of the current epoch a worker has taken, and records it for a replacement of worker 0.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from polyrhythm.api.loop.loop_duties import LoopDuties
from polyrhythm.api.loop.position import ALL, UNKNOWN, Logbook, LoopProgress, Mark, Position, find_position
from polyrhythm.api.loop.store_board import StoreBoard
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.launch.script import WorkerStatus, WorkerStatuses, begun_key
from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.trainer import Trainer
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import Rejoin
from polyrhythm.strategies.strategy import Strategy


@dataclass(frozen=True)
class Begun:
    """The beginning of an epoch.

    Attributes:
        loop: number of loops over epochs that the script has finished before.
        epoch: number of the epoch in this loop.
        steps: steps that the worker had taken, or worker 0.
    """

    loop: int
    epoch: int
    steps: int

    def to_text(self) -> str:
        """Serialize it for the store."""
        return json.dumps([self.loop, self.epoch, self.steps])

    @classmethod
    def from_text(cls, text: str | None) -> Begun:
        """Parse the result of `to_text`; without it, return the very first beginning."""
        return cls(0, 0, 0) if text is None else cls(*json.loads(text))


class Entry(Protocol):
    """How a worker enters the loop of the others.

    Attributes:
        rejoins: whether the worker is a replacement, and the others are training already.
        waits: whether replacements wait until they are admitted.
        inside: workers among which this one, a replacement, was admitted in the middle of an epoch; else empty.
    """

    rejoins: bool
    waits: bool
    inside: tuple[int, ...]

    def admit_workers(self, begun: Begun, entering: Sequence[int]) -> None:
        """Admit waiting workers, if this worker is the coordinator."""

    def entered(self) -> Begun:
        """Report that this worker, a replacement, is present; return the epoch with which it begins."""

    def present(self) -> tuple[list[int], list[int]]:
        """Return the workers that will have a share of the next epoch, and those of them that wait for admission."""

    def continue_run(self, begun: Begun) -> None:
        """Begin an epoch in which this worker, a replacement, takes the rest of its share."""

    def begins(self, begun: Begun) -> None:
        """Note that an epoch begins for this worker."""


class Epochs:
    """Iterates over the epochs of one worker's loop.

    Args:
        worker: index of the worker.
        board: board on which marks are posted.
        loop_progress: progress of its loop.
        entry: entry into the loop of the others.

    Attributes:
        present: workers that have a share of the current epoch; None outside of epochs.
        dealt: workers among which the current epoch was divided at its beginning.
        resumed: epoch with which a resumed run begins; None: the run is new.
    """

    def __init__(self, worker: int, board: StoreBoard, loop_progress: LoopProgress, entry: Entry) -> None:
        self.present: tuple[int, ...] | None = None
        self.dealt: tuple[int, ...] = ()
        self.resumed: Begun | None = None
        self._worker = worker
        self._board = board
        self._loop_progress = loop_progress
        self._entry = entry
        self._loops = 0
        self._entered: Begun | None = None

    def through(self, count: int, start: Callable[[], object]) -> Iterator[int]:
        """Return the epochs of a loop in which this worker has a share.

        Args:
            count: number of epochs.
            start: function that starts the replica with the others; on return a replacement is a member.
        """
        loop, self._loops = self._loops, self._loops + 1
        start()
        if self._entry.rejoins and self._entered is None:
            self._entered = self._entry.entered()
        entered, resumed = self._entered, self.resumed
        if entered is None and resumed is not None and loop <= resumed.loop:
            return self._epochs(loop, range(resumed.epoch, count), None) if loop == resumed.loop else iter(())
        if entered is None or loop > entered.loop:
            return self._epochs(loop, range(count), None)
        if loop < entered.loop:  # finished by its predecessor
            return iter(())
        return self._epochs(loop, range(entered.epoch, count), entered)

    def _epochs(self, loop: int, epochs: range, entered: Begun | None) -> Iterator[int]:
        behind = entered is not None
        away = False  # without a share of an epoch, this worker does not know the loop's position after it
        try:
            for epoch in epochs:
                mark = self._mark(loop, epoch, away=away)
                if mark is None:  # the others have left the loop early
                    return
                if behind:
                    self._loop_progress.go_to(mark)
                else:
                    self._loop_progress.check_alike(mark)
                present = mark.present if entered is None else self._entry.inside or mark.present
                away = behind = self._worker not in present
                if away:
                    continue
                self.present, self.dealt = present, mark.present
                self._begin(Begun(loop, epoch, mark.steps), mark, entered)
                behind = entered is not None  # its schedulers by batch were stepped by another process
                entered = None
                yield epoch
        finally:
            self._end(loop, away=away)

    def _begin(self, begun: Begun, mark: Mark, entered: Begun | None) -> None:
        """Begin an epoch, or continue in the middle of one."""
        assert self._loop_progress.optimizer is not None, "a loop has something to train"
        own = replace(begun, steps=self._loop_progress.optimizer.steps) if entered is None else entered
        self._entry.begins(own)
        if entered is not None:
            self._entry.continue_run(entered)
        else:
            self._board.post(begun_key(self._worker), own.to_text())
        self._entry.admit_workers(begun, mark.entering)

    def _mark(self, loop: int, epoch: int, *, away: bool) -> Mark | None:
        key, end = f"script/epochs/{loop}/{epoch}", _end_key(loop)
        if away:
            self._board.await_one([key, end], "the others to begin the next epoch")
            text = self._board.read(key)
            return None if text is None else Mark.from_text(text)
        present, entering = self._entry.present()
        return Mark.from_text(
            self._board.post_if_absent(key, self._loop_progress.mark(present, entering).to_text())
        )

    def _end(self, loop: int, *, away: bool) -> None:
        self.present = None
        if away:
            text = self._board.await_one([_end_key(loop)], "the others to end the loop")
            self._loop_progress.go_to(Mark.from_text(text))
        else:
            self._board.post_if_absent(_end_key(loop), self._loop_progress.mark((), ()).to_text())


def _end_key(loop: int) -> str:
    return f"script/epochs/{loop}/end"


class EpochProgress:
    """Counts the training batches of one worker in the current epoch, over all shards together.

    Args:
        loop_progress: progress of its loop.
        logbook: recorder of the loop's positions; None where they are not needed.

    Attributes:
        loop_progress: the argument of that name.
        at: the current epoch, or the last one; None before the first.
        is_over: whether a share of it has been handed out to its end, or the user has left the loop.
        passes: number of iterations for training begun in it.
        open: number of these that have not ended.
        leaves_out: batches of it that a predecessor has taken, and that no share has left out yet.
    """

    def __init__(self, loop_progress: LoopProgress, logbook: Logbook | None) -> None:
        self.at: Begun | None = None
        self.is_over = False
        self.leaves_out = self.passes = self.open = 0
        self.loop_progress = loop_progress
        self._logbook = logbook
        self._taken = self._first_step = 0
        self._taken_before = array("q", [0])
        self._seated_in: Begun | None = None

    def begin(self, at: Begun) -> None:
        """Begin an epoch without taken or skipped batches."""
        self.at = at
        self.is_over = False
        self.leaves_out = self.passes = self.open = self._taken = 0
        self._first_step, self._taken_before = at.steps, array("q", [0])

    @property
    def taken(self) -> int:
        """Number of batches taken."""
        return self._taken

    @property
    def _fetched_ahead(self) -> int:
        """Batches that the loop takes before the step that uses them, by its first two steps; 0 until these are done.

        Its first step follows these and its own batches, each other step its own alone.
        """
        if len(self._taken_before) < 3:
            return 0
        first, second, third = self._taken_before[:3]
        return max(0, (second - first) - (third - second))

    @property
    def _taken_by_steps(self) -> int:
        return self.taken_before(self._first_step + len(self._taken_before))

    def be_seated(self) -> int:
        """Begin a share of the epoch; return how many batches to leave out, maybe more than it has."""
        self._seated_in = self.at
        self.is_over = False
        self.passes, self.open = self.passes + 1, self.open + 1
        return self.leaves_out

    def left_out(self, batches: int) -> None:
        """Note that this number of batches of a share need not be taken again."""
        assert self.loop_progress.optimizer is not None, "a loop has something to train"
        self.leaves_out -= batches
        self._taken += batches
        self._first_step, self._taken_before = self.loop_progress.optimizer.steps, array("q", [self._taken])

    @property
    def between_steps(self) -> bool:
        """Whether all batches taken are in steps; False as long as some may have been fetched ahead."""
        unsure = len(self._taken_before) == 2 and self._taken_before[1] > self._taken_before[0] + 1
        return self._taken == self._taken_by_steps and not unsure

    @property
    def here(self) -> Position:
        """Position of the loop, between two steps."""
        assert self.at is not None, "an epoch has begun"
        return self.loop_progress.position((self.at.loop, self.at.epoch), self._taken)

    def taken_before(self, step: int) -> int:
        """Return the number of batches of the steps before one of this epoch, as far as this worker has taken them."""
        done = min(max(0, step - self._first_step), len(self._taken_before) - 1)
        return self._taken_before[done] - (self._fetched_ahead if done else 0)

    def took(self) -> None:
        """Note that one more batch is taken."""
        self._taken += 1

    def through(self, *, broken_off: bool) -> None:
        """Note that a share has ended, or the user has left the loop; an iterator that was kept may call this late."""
        if self._seated_in is self.at:
            self.is_over = True
            self.open -= 1
            self._note(ALL if broken_off else self._taken, at_end=True)

    def step_begins(self) -> None:
        """Note that a step begins, with the batches since the previous one."""
        self._note(self._taken_by_steps)

    def step_done(self) -> None:
        """Note that a step has been taken."""
        self._taken_before.append(self._taken)

    def leave(self) -> None:
        """Note that no more steps will be taken."""
        self._note(ALL, at_end=True)

    def next_epoch(self) -> Begun:
        """Return the epoch with which a run saved now will resume: the current one, or the next if that is over."""
        assert self.loop_progress.optimizer is not None, "a loop has something to train"
        steps = self.loop_progress.optimizer.steps
        if self.at is None:
            return Begun(0, 0, steps)
        return Begun(self.at.loop, self.at.epoch + self.is_over, steps)

    def _note(self, taken: int, *, at_end: bool = False) -> None:
        at, optimizer = self.at, self.loop_progress.optimizer
        if self._logbook is None or at is None or optimizer is None:
            return
        unknown = not self._taken and optimizer.steps > at.steps
        known = UNKNOWN if unknown else taken
        self._logbook.note(self.loop_progress.position((at.loop, at.epoch), known, at_end=at_end))


class LoopEntry(Entry):
    """Brings one worker into the loop of the others; see `Entry`.

    Args:
        world: context of this rank.
        strategy: strategy; its fault policy decides which failures the run survives.
        board: board of the workers.
        statuses: statuses of the workers.
        progress: progress of this worker in its loop.
        control: control plane of this worker.

    Attributes:
        rejoins: whether this worker is a replacement, and the others are training already.
        waits: whether replacements wait until they are admitted; one of worker 0 does not.
        inside: see `Entry`.
        reform: regroups with the present workers, between two steps; set once something is distributed.
        duties: duties of the coordinator; None on other workers.
        trainer: trainer of the worker; None until it begins.
        started: called when training starts, with the seconds for which the others have been training.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        board: StoreBoard,
        statuses: WorkerStatuses,
        progress: EpochProgress,
        control: ControlPlane,
    ) -> None:
        workers = len(world.roles.workers)
        self.rejoins = world.rejoins
        faults = strategy.faults(workers)
        self.waits = faults.regroups
        self.inside: tuple[int, ...] = ()
        self._stays_behind = faults.rejoin is Rejoin.BEHIND
        self._world = world
        self._board = board
        self._statuses = statuses
        self._progress = progress
        self._loop_progress = progress.loop_progress
        self._control = control
        self.duties: LoopDuties | None = None
        self.reform: Callable[[], None] = lambda: None
        self._position: Position | None = None
        self._worker = world.roles.workers.index(world.network.rank)
        self.trainer: Trainer | None = None
        self.started: Callable[[float], None] = lambda elapsed_s: None

    def begin(self, trainer: Trainer, step: int) -> int:
        """Start a replica with all others, or among them; return the step to begin with.

        Args:
            trainer: trainer of the worker.
            step: step at which it would start.
        """
        self.trainer = trainer
        if self.rejoins:
            return self._rejoin(trainer, step)
        self._control.enter()
        self._control.begin(0)
        began = trainer.open(step)
        self.started(0.0)
        return began

    def admit_workers(self, begun: Begun, entering: Sequence[int]) -> None:
        """Admit waiting workers, if this worker is the coordinator; the others interrupt their next step for it."""
        position, self._position = self._position, None
        # In the middle of an epoch the previous coordinator has admitted others to it.
        inside = position is not None and position.taken > 0
        if self.duties is None or not entering or inside:
            return
        for worker in entering:
            self._board.post(_entered_key(worker), begun.to_text())
        if self.duties.admit(entering, lambda worker: self._statuses.of(worker) is not WorkerStatus.WAITING):
            self.reform()

    def admit_inside(self) -> None:
        """Admit waiting workers in the middle of an epoch; called on the coordinator, before a batch."""
        assert self.duties is not None, "only the coordinator admits others"
        statuses = self._statuses.read()
        waiting = [worker for worker in self.duties.waiting if statuses[worker] is WorkerStatus.WAITING]
        for worker in waiting:
            key = _inside_key(worker, self.duties.waiting[worker])
            self._board.post(key, self._progress.here.to_text())
        if waiting and self.duties.admit(waiting, lambda worker: True):
            self.reform()

    def note_admission(self, members: tuple[int, ...]) -> None:
        """Note among which members this worker, a replacement, is admitted, and where."""
        text = self._board.read(_inside_key(self._worker, self._world.generation))
        if text is not None:
            self._position, self.inside = Position.from_text(text), members

    def was_admitted_to(self, begun: Begun) -> bool:
        """Whether this worker, a replacement, was admitted in the middle of an epoch."""
        position = self._position if self.inside else None
        return position is not None and (position.loop, position.epoch) == (begun.loop, begun.epoch)

    def present(self) -> tuple[list[int], list[int]]:
        """Return the workers that will have a share of the next epoch, and those of them that wait for admission.

        Workers in lockstep know their members, and worker 0 is always present again; but where they rarely meet, the
        launcher may learn of a failure earlier. Other workers learn of failures from the launcher alone, at various
        times.
        """
        statuses = self._statuses.read()
        waiting = [worker for worker, status in enumerate(statuses) if status is WorkerStatus.WAITING]
        there = {
            worker
            for worker, status in enumerate(statuses)
            if status in (WorkerStatus.HERE, WorkerStatus.BEHIND)
        }
        members = None if self.trainer is None else self.trainer.members
        if members is not None:
            there = {worker for worker in members if worker in there or worker == LEADER}
        return sorted({*there, *waiting}), waiting

    def entered(self) -> Begun:
        """Report that this worker, a replacement, is present; return the epoch with which it begins."""
        waited = self.waits and self.duties is None
        begun = Begun.from_text(
            self._board.read(_entered_key(self._worker) if waited else begun_key(self._worker))
        )
        if self.waits and not waited:
            begun = self._advance_to_position(begun)
        elif self._position is not None:
            begun = Begun(self._position.loop, self._position.epoch, self._position.steps)
        self._statuses.set(self._worker, WorkerStatus.BEHIND if self._stays_behind else WorkerStatus.HERE)
        return begun

    def continue_run(self, begun: Begun) -> None:
        assert self._loop_progress.optimizer is not None, "a loop has something to train"
        if self._position is not None:
            self._loop_progress.advance_to(self._position)
            self._progress.leaves_out = self._position.taken
            if self.inside:
                self._loop_progress.optimizer.continue_at(begun.steps)
        elif self.waits:
            self._loop_progress.optimizer.continue_at(begun.steps)
        else:
            self._progress.leaves_out = max(0, self._loop_progress.optimizer.steps - begun.steps)

    def begins(self, begun: Begun) -> None:
        self._progress.begin(begun)

    def _advance_to_position(self, begun: Begun) -> Begun:
        """Wait until one of the workers in lockstep has posted its position; return the epoch of that."""
        regroup = None if self.trainer is None else self.trainer.regroup
        generation = self._world.generation
        assert regroup is not None, "synchronous workers regroup"
        last = begun.loop, begun.epoch
        found = self._board.await_found(
            lambda: find_position(self._board, generation, regroup.step, last),
            "another worker to report where the loops are",
        )
        if found.taken == UNKNOWN:
            raise RunError(
                "worker 0 was lost in the middle of an epoch with batches that group.shard has not assigned, so its "
                "replacement cannot skip those that are taken: use group.shard"
            )
        self._position = found
        return Begun(found.loop, found.epoch, found.steps)

    def _rejoin(self, trainer: Trainer, step: int) -> int:
        if self.waits and self.duties is None:
            self._statuses.set(self._worker, WorkerStatus.WAITING)
        try:
            elapsed_s = self._control.enter().elapsed_s
            self._control.begin(0)
            began = trainer.open(step)
            self.started(elapsed_s)
            return began
        except PeerLost as loss:
            if self.duties is not None:
                raise
            print(f"polyrhythm: worker {self._worker} is not let in any more: {loss}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(0)


def _entered_key(worker: int) -> str:
    return f"script/entered/{worker}"


def _inside_key(worker: int, generation: int) -> str:
    return f"script/inside/{worker}/{generation}"
