"""Coordination of a worker's own loop with the others', apart from steps: epochs, shares of data, means, the end."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.api.loop.distributed_optimizer import ServerStates
from polyrhythm.api.loop.divisions import Divisions, View
from polyrhythm.api.loop.epochs import Begun, EpochProgress, Epochs, LoopEntry
from polyrhythm.api.loop.loop_duties import LoopDuties, load_final_model, meets_every_step
from polyrhythm.api.loop.loop_evaluation import Evaluate, LoopEvaluation, LoopEvaluator
from polyrhythm.api.loop.loop_storage import LoopSnapshot, LoopStorage, with_ranks
from polyrhythm.api.loop.position import ALL, Logbook, LoopProgress
from polyrhythm.api.loop.shard import DealtLoader, Division, Host, Seat
from polyrhythm.api.loop.store_board import Ends, Means, StoreBoard
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import CheckpointSaved, Evaluated, Event, Notice, RunEnded, RunStarted, ServerLost
from polyrhythm.launch.devices import check_kinds_of_devices, why_one_kind_of_device
from polyrhythm.launch.script import ADMITS_KEY, OVER_KEY, WHOLE_KEY, WorkerStatus, WorkerStatuses
from polyrhythm.roles.checkpoint_interval import Interval
from polyrhythm.roles.checkpointing.archive import Archivist
from polyrhythm.roles.checkpointing.model_snapshot import ModelSnapshot
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.control_messages import TakenBatches
from polyrhythm.roles.control_plane import Boundary
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.ledger import Attendance, Ledger
from polyrhythm.roles.member import Member
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.result import digest
from polyrhythm.roles.step_metrics import report_interval_s
from polyrhythm.roles.trainer import Trainer
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy

if TYPE_CHECKING:
    from polyrhythm.api.loop.loop_report import LoopLog, LoopMeter


class UserWorkload:
    """Workload of a user's own loop; see `Workload`. It keeps its share of the current epoch.

    Args:
        replica: replica of the user's model.
        regrouped: called after each regrouping of all workers.

    Attributes:
        replica: the argument of that name.
    """

    def __init__(self, replica: Replica, regrouped: Callable[[], None]) -> None:
        self.replica = replica
        self._regrouped = regrouped

    def share_out(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Keep the share of the current epoch until its rest is divided again."""
        self._regrouped()

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Keep the share of the current epoch."""


class Coordination(Host):
    """Coordinates one worker's loop with the others'.

    Args:
        strategy: strategy of the run.
        world: context of this rank.
        home: connections of this rank.
        meter: meter of this worker's loop; None without a report.
        log: receiver of all events, on the coordinator.

    Attributes:
        board: board in the store, by which workers agree.
        loop_progress: progress of this worker's loop.
        control: control plane of this worker.
        reform: regroups with the present workers, between two steps; set once something is distributed.
        entry: entry of this worker into the run.
        epochs: epochs of its loop.
        means: means over the workers.
        ends: ends of loops with unequal numbers of steps.
        workers: number of workers that share the present epoch, or the last one.
        epoch_count: number of epochs of the loop, once it is known; 0 before.
    """

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        home: Rank,
        meter: LoopMeter | None = None,
        log: LoopLog | None = None,
    ) -> None:
        in_step = strategy.traits(len(world.roles.workers)).lockstep
        self.loop_progress = LoopProgress(in_step=in_step)
        self.epoch_count = 0
        self._meter = meter
        self._log = log
        self._strategy = strategy
        self._world = world
        self._store = home.rendezvous.store
        ranks = world.roles.workers
        self._worker = ranks.index(world.network.rank)
        self.workers = len(ranks)
        self._replica: Replica | None = None
        self._statuses = WorkerStatuses(self._store, len(ranks), lambda worker: home.is_lost(ranks[worker]))
        self.reform: Callable[[], None] = lambda: None
        self._reported_at_s = -inf
        self._duties = LoopDuties(world, strategy, self._report) if world.leads else None
        self.control: Leader | Member = (
            Member(world, strategy, awaits_model=True)
            if self._duties is None
            else self._lead(self._duties, home.rendezvous.met)
        )
        self._reports_batches = not world.leads and not meets_every_step(strategy, len(ranks))
        self.board = StoreBoard(self._store, self._attend)
        faults = strategy.faults(len(ranks))
        awaited = faults.regroups and world.continues_without(LEADER, faults)
        self._logbook = Logbook(self.board) if awaited else None
        self._progress = EpochProgress(self.loop_progress, self._logbook)
        self.entry = LoopEntry(world, strategy, self.board, self._statuses, self._progress, self.control)
        self.entry.duties = self._duties
        self.entry.started = self._started
        if self._duties is not None:
            self._duties.started = self._open_log
        self.epochs = Epochs(self._worker, self.board, self.loop_progress, self.entry)
        self._divisions = Divisions(self._worker, self.board)
        self.means = Means(self._worker, self.board, self._statuses, self._awaited)
        self.ends = Ends(self._worker, self.board, self._statuses)
        self._trainer: Trainer | None = None
        self._archivist: Archivist[LoopSnapshot] | None = None
        self.evaluator: LoopEvaluator | None = None
        self._begun: LoopSnapshot | None = None

    @property
    def server_states(self) -> ServerStates | None:
        """Servers' side of saved states, on the coordinator."""
        if self._duties is None or not self._world.roles.servers:
            return None
        return ServerStates(self._world, self._strategy.faults(self.workers), self._duties.ask_servers)

    def take(self, replica: Replica, digest_every: int) -> Trainer:
        """Join the replica to those of the others; return its trainer."""
        self._replica = replica
        workload = UserWorkload(replica, self._formed)
        self._trainer = Trainer(self._world, self._strategy, workload, self.control, digest_every)
        self.control.replica = replica
        return self._trainer

    def check_device(self, kind: str) -> None:
        """Refuse a kind of device other than worker 0's, where the bits of all replicas must agree.

        Called where a worker waits for worker 0 anyway.

        Args:
            kind: kind of this worker's device, such as cpu or cuda.

        Raises:
            RequestError: the strategy does not allow different kinds.
        """
        many, key = len(self._world.roles.workers), "script/device"
        if many == 1 or not why_one_kind_of_device(self._strategy, many):
            return

        def look() -> str | None:
            device_kind = self.board.read(key)
            gone = device_kind is None and self._statuses.of(LEADER) is WorkerStatus.GONE
            return kind if gone else device_kind

        if self._worker == LEADER:  # its replacement finds its predecessor's kind
            leaders = self.board.post_if_absent(key, kind)
        else:
            leaders = self.board.await_found(look, "worker 0 to begin its training")
        if leaders != kind:
            check_kinds_of_devices(
                self._strategy,
                many,
                f"the model of worker {self._worker} is on {kind}, and that of worker 0 on {leaders}: ",
                'such as model.to("cpu") on all',
            )

    def seat(self, shard: int, epoch: int) -> Seat:
        """Return this worker's share of an iteration over a shard that begins.

        Raises:
            RunError: the others continue without this worker.
        """
        trains = torch.is_grad_enabled()  # else it is an evaluation
        if trains and self.loop_progress.optimizer is not None:
            self.loop_progress.optimizer.begin_epoch()
        present: tuple[int, ...] | None = self.epochs.present
        if present is None:
            here = json.dumps(self.entry.present()[0])
            present = tuple(json.loads(self.board.post_if_absent(f"script/deal/{shard}/{epoch}", here)))
        if self._worker not in present:
            raise RunError(
                f"the others have dropped worker {self._worker} as failed, and continue without it"
            )
        self.workers = len(present)
        taken = self._progress.be_seated() if trains else 0
        at = self._progress.at
        if trains and at is not None and self._progress.passes == 1:
            self._divisions.begin((at.loop, at.epoch), self.epochs.dealt)
            if not self._divisions.has_share:
                many = len(self.epochs.dealt)
                return Seat(0, many, taken, division=Division(ALL, self.epochs.dealt, many))
        return Seat(present.index(self._worker), len(present), taken)

    def seat_again(self, taken: int, loader: DealtLoader) -> Seat | None:
        """Return this worker's share of the rest of the epoch, if workers have failed or joined; else None."""
        if not self._divides or not self.counts_epochs or self._progress.open != 1:
            return None
        duties, ends = self._duties, taken >= len(loader)
        if duties is not None and duties.waiting and self._progress.between_steps and not ends:
            self.entry.admit_inside()
        division = self._divisions.after(taken, loader, self._progress.taken_before)
        if division is None:
            return None
        if duties is not None and not ends:
            duties.unseen.clear()
        self.epochs.present = division.members
        self.workers = len(division.members)
        return Seat(division.members.index(self._worker), self.workers, taken, division=division)

    @property
    def _divides(self) -> bool:
        """Whether the rest of the current epoch can be divided again: it has one pass for training, so far."""
        optimizer = self.loop_progress.optimizer
        return self._progress.passes < 2 and not (optimizer is not None and optimizer.uneven)

    def left_out(self, batches: int) -> None:
        self._progress.left_out(batches)

    def rest(self) -> None:
        if self._meter is not None:
            self._meter.rest()

    def took(self, taken: int, of: int, batch: Any) -> None:
        self._progress.took()
        if self._meter is not None:
            self._meter.took(batch)
            self._meter.epoch = 0 if self._progress.at is None else self._progress.at.epoch
        self._report_batches(taken, of)

    def through(self, of: int, *, broken_off: bool) -> None:
        if not broken_off:
            self._report_batches(of, of)
        self._progress.through(broken_off=broken_off)

    def step_begins(self) -> None:
        """Note that a step begins."""
        self._progress.step_begins()

    def step_done(self) -> None:
        """Note that a step has been taken."""
        self._progress.step_done()
        self.control.after_step()
        if self.evaluator is not None:
            self.evaluator.evaluator.look()
        optimizer = self.loop_progress.optimizer
        if self._meter is not None and optimizer is not None:
            self._meter.step_done(optimizer.steps + 1, float(optimizer.param_groups[0]["lr"]))

    def report_admission(self) -> None:
        """Post for the launcher why no replacement of a failed worker could enter the loop; empty if one could."""
        if self._duties is not None:
            self.board.post(ADMITS_KEY, self._why_none_is_admitted())

    def report_unseen(self, *, final: bool = False) -> None:
        """Report the batches that failed workers have not taken of their shares, unless replacements take them.

        Args:
            final: whether no more replacements can join.
        """
        if self._duties is None:
            return
        statuses = self._statuses.read()
        for worker, left, of in self._duties.unseen:
            never = not self._duties.is_there(worker) if final else statuses[worker] is WorkerStatus.GONE
            if self.entry.waits or never:
                many = "the last" if self._duties.knows else "at most"
                print_line(
                    f"of worker {worker}, which is lost, {many} {left} of its {of} batches of an epoch are not seen"
                )
        self._duties.unseen.clear()

    def collect(self, own: WorkerState) -> tuple[dict[int, WorkerState], list[State]] | None:
        """Hand in this worker's state; return the states of all workers and servers, on the coordinator.

        All call it, and none continues before all states are present, so that they are of one moment.

        Args:
            own: state of this worker that does not change any more.
        """
        number, self.loop_progress.averages = self.loop_progress.averages, self.loop_progress.averages + 1
        own = replace(own, loop=own.loop | {"number": number})
        self.control.boundary(Boundary.EPOCH, own)
        found = None
        if (duties := self._duties) is not None:

            def look() -> dict[int, WorkerState] | None:
                self._attend()
                here = self._here()
                if (given := duties.met(number, here)) is None:
                    self.means.check_others(number, "group.state_dict", here - {self._worker})
                return given

            workers = self.board.await_found(look, "the others to call group.state_dict")
            assert self._replica is not None, "something has been distributed"
            self._replica.part.check_servers()
            found = workers, duties.ask_servers() if self._world.roles.servers else []
        self.means.mean(number, 0.0, 1.0, "group.state_dict")
        return found

    def save_every(self, every: Interval, storage: LoopStorage) -> None:
        """Write checkpoints at this interval; called on all workers after their first step.

        Args:
            every: interval between checkpoints.
            storage: place of the checkpoints.
        """
        resumed, optimizer = self.epochs.resumed, self.loop_progress.optimizer
        assert optimizer is not None, "a loop has something to train"
        since = (0, 0) if resumed is None else (resumed.steps, resumed.epoch)
        if self._world.rejoins:
            since = optimizer.steps - 1, self.next_epoch.epoch
        if self._duties is not None:
            self._duties.save_every(every, since)
            self._duties.write = self._write
            self._archivist = Archivist(storage, self._world.activity, self._emit_now, beside=True)
        elif isinstance(self.control, Member):
            self.control.save_every(every, since)

    def evaluate(self, function: Evaluate, *, skips_failures: bool) -> LoopEvaluation:
        """Begin to evaluate a copy of the coordinator's model; a no-op on other workers.

        Args:
            function: function of the user that returns numbers by name.
            skips_failures: whether a failure is reported and skipped; else it ends the run.

        Raises:
            RequestError: steps cannot continue during an evaluation.
            RunError: an earlier one has failed.
        """
        optimizer = self.loop_progress.optimizer
        steps = 0 if optimizer is None else optimizer.steps
        if self._duties is None:
            return LoopEvaluation(steps, None)
        assert self._replica is not None, "something has been distributed"
        if self.evaluator is None:
            self.evaluator = LoopEvaluator(
                self._replica, self._world, self._emit_now, skips_failures=skips_failures
            )
        elif self.evaluator.skips_failures is not skips_failures:
            raise RequestError("group.evaluate_async: a loop has one on_error: give the same in all calls")
        return self.evaluator.begin(
            function, self.next_epoch.epoch, steps, self._elapsed_s, self._log_evaluated
        )

    def _log_evaluated(self, model: ModelSnapshot, values: dict[str, float]) -> None:
        """Report results of an earlier step, where a report is enabled."""
        tested, others = _parted(values)
        if tested and self._log is not None:
            event = Evaluated(
                time_s=self._elapsed_s,
                epoch=model.epoch,
                step=model.step,
                snapshot_s=model.taken_s,
                **tested,
            )
            self._log.on_event(event)
        if others and self._meter is not None:
            self._meter.log(self._worker, model.step, others)

    def state_due(self) -> bool:
        """Return whether this worker's state is due for a checkpoint.

        The coordinator begins to write the one before once it has all states.
        """
        optimizer = self.loop_progress.optimizer
        assert optimizer is not None, "a loop has something to train"
        due = self.control.state_due(optimizer.steps, self.next_epoch.epoch)
        if self._archivist is not None:
            self._archivist.look()
            self.control.after_step()  # receives what has arrived
            self._write()
        return due

    def _write(self) -> bool:
        """Begin to write a checkpoint that has all states; return whether none is being collected."""
        states = None if self._duties is None else self._duties.states
        if states is None or self._archivist is None:
            return True
        if (found := states.held()) is not None and self._begun is not None:
            begun, self._begun = self._begun, None
            self._archivist.begin(replace(begun, state=with_ranks(begun.state, *found)))
        return not states.open

    def send_state(self, own: WorkerState, state: Callable[[], dict[str, Any]]) -> None:
        """Hand in this worker's state for a checkpoint, which the coordinator writes once it has those of all.

        Args:
            own: state of this worker that does not change any more.
            state: function that returns the state of the run without those of workers and servers; called on the
                coordinator.
        """
        self.control.boundary(Boundary.CHECKPOINT, own)
        if self._duties is None or self._duties.states is None or self._duties.states.open:
            return
        assert self._replica is not None, "something has been distributed"
        self._replica.part.check_servers()
        self._begun = LoopSnapshot(self.next_epoch.epoch, own.account.step, state())
        self._duties.states.begin(own.account.step, awaits=True)

    def _emit_now(self, event: Event) -> None:
        self._report(replace(event, time_s=self._elapsed_s))

    def _here(self) -> set[int]:
        statuses = self._statuses.read()
        here = {worker for worker, status in enumerate(statuses) if status is WorkerStatus.HERE}
        return here.intersection(self._awaited()) | {self._worker}

    @property
    def counts_epochs(self) -> bool:
        """Whether the loop uses the epochs of `group.epochs`."""
        return self._progress.at is not None

    @property
    def epoch_under_way(self) -> str:
        """Name of the current epoch for keys, the same on all workers; empty outside of `group.epochs`."""
        at = self._progress.at
        return "" if at is None else f"{at.loop}.{at.epoch}"

    @property
    def next_epoch(self) -> Begun:
        """Epoch with which a run saved now will resume."""
        return self._progress.next_epoch()

    def leave(self, replica: Replica, steps: int) -> Counter[int]:
        """Leave with all others; the replica then holds the run's final model.

        Returns:
            The number of gradients applied at each staleness, as far as this worker knows.
        """
        assert self._trainer is not None, "something has been distributed"
        self._progress.leave()
        self._trainer.close()
        if self.evaluator is not None:
            self.evaluator.evaluator.wait()
        tally = None if self._meter is None else self._meter.tally
        if self._meter is not None and self.loop_progress.optimizer is not None:
            self._meter.end(steps, float(self.loop_progress.optimizer.param_groups[0]["lr"]))
        staleness = Counter(replica.part.staleness)
        account = Account(
            self._worker,
            steps,
            steps if tally is None else tally.steps,
            0 if tally is None else tally.images,
            0,
            0.0,
            replica.bytes_sent,
            {str(age): count for age, count in staleness.items()},
            final=True,
        )
        model = self.control.leave(WorkerState.of(replica, account, {}, to_resume=False))
        assert model is not None, "the leader of a loop hands the final model out"
        load_final_model(replica, model)
        if self._duties is not None:
            staleness.update(self._duties.staleness)
        replica.part.close()
        if self._archivist is not None:
            self._archivist.wait()
        self.report_unseen(final=True)
        if self._log is not None and self._duties is not None:
            figures = self._duties.figures() | self._known() | {"run": str(self._log.folder)}
            figures["parameters_sha256"] = digest(replica.flat.vector)
            self._log.end(RunEnded(time_s=self._elapsed_s, outcome="done", result=figures), None)
        return staleness

    def log(self, values: dict[str, float]) -> None:
        """Report numbers logged by the user, where a report is enabled."""
        optimizer = self.loop_progress.optimizer
        if self._meter is not None and optimizer is not None:
            self._meter.loss = values.get("loss", self._meter.loss)
            tested, others = _parted({name: value for name, value in values.items() if name != "loss"})
            if tested and self._log is not None:
                self._meter.end(optimizer.steps, float(optimizer.param_groups[0]["lr"]))
                epochs = self.next_epoch.epoch
                self._log.on_event(
                    Evaluated(time_s=self._elapsed_s, epoch=epochs, step=optimizer.steps, **tested)
                )
            if others:
                self._meter.log(self._worker, optimizer.steps, others)

    def fail(self, error: BaseException) -> None:
        """End what runs of a loop that has ended with an error, and write its report."""
        if self.evaluator is not None:
            self.evaluator.evaluator.drop()
        if self._log is not None:
            self._log.end(RunEnded(time_s=self._elapsed_s, outcome="failed", result={}), error)

    def saved(self, path: Path) -> None:
        """Note that the run's state has been written."""
        if self._log is not None:
            begun, optimizer = self.next_epoch, self.loop_progress.optimizer
            steps = 0 if optimizer is None else optimizer.steps
            self._log.on_event(
                CheckpointSaved(time_s=self._elapsed_s, path=str(path), epoch=begun.epoch, step=steps)
            )

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._duties is None else self._duties.elapsed_s

    def _known(self) -> dict[str, Any]:
        """Return the known facts of the run before it begins."""
        assert self._replica is not None, "something has been distributed"
        shards = self.loop_progress.shard_names()
        return {
            "strategy": str(self._strategy),
            "data": shards[0] if shards else "data",
            "model": type(self._replica.model).__name__,
            "workers": len(self._world.roles.workers),
            "servers": len(self._world.roles.servers),
            "epochs": self.epoch_count,
        }

    def _open_log(self) -> None:
        assert self._replica is not None, "something has been distributed"
        if self._log is None:
            return
        traits = self._strategy.traits(len(self._world.roles.workers))
        resumed = self.epochs.resumed
        started = RunStarted(
            time_s=0,
            **self._known(),
            steps_per_epoch=self.loop_progress.steps_per_epoch,
            start_epoch=0 if resumed is None else resumed.epoch,
            start_step=0 if resumed is None else resumed.steps,
            parameters=self._replica.flat.size,
            free_running=not traits.waits_for_slower,
        )
        self._log.begin(started, resumed=resumed is not None, threads=torch.get_num_threads())
        if self._duties is not None:
            self._duties.began_s -= self._log.began_s

    def _started(self, elapsed_s: float) -> None:
        if self._meter is not None:
            in_step = self._strategy.traits(len(self._world.roles.workers)).lockstep
            if self._duties is not None:
                elapsed_s = self._duties.elapsed_s
            self._meter.begin(self.control, self._worker, elapsed_s, in_step=in_step)

    def _lead(self, duties: LoopDuties, met: Mapping[int, int]) -> Leader:
        """Return the coordinator, which reads the present workers from the store if it is a replacement."""
        ranks = self._world.roles.workers
        ledger = Ledger.of(len(ranks))
        if self._world.rejoins:
            here = [
                worker
                for worker, status in enumerate(self._statuses.read())
                if status in (WorkerStatus.HERE, WorkerStatus.BEHIND)
            ]
            losses = {worker: met.get(rank, 0) for worker, rank in enumerate(ranks)}
            losses[self._worker] = self._world.generation
            attendance = Attendance(len(ranks)).to_json() | {
                "present": {self._worker, *here},
                "losses": losses,
            }
            ledger = Ledger(Attendance.from_json(attendance))
        duties.over = lambda: self.board.post(OVER_KEY, "")
        duties.ready = lambda rank, generation: self.board.post(f"{WHOLE_KEY}/{rank}/{generation}", "")
        return Leader(replace(self._world, emit=self._report), self._strategy, duties, ledger)

    def _attend(self) -> None:
        """Regroup while this worker waits for others, where that is requested."""
        while self.control.attend():
            self.reform()

    def _report_batches(self, taken: int, of: int) -> None:
        """Report at intervals, and at an epoch's beginning and end; the coordinator knows its own progress at once."""
        now_s = self._world.clock.now()
        rarely = self._reports_batches and (
            taken in (0, of)
            or now_s - self._reported_at_s >= report_interval_s(len(self._world.roles.workers))
        )
        if rarely or self._duties is not None:
            self._reported_at_s = now_s
            self.control.report(TakenBatches(taken, of))

    def _formed(self) -> None:
        """Note that workers continue in another view: post the position of this one for the others."""
        regroup = None if self._trainer is None else self._trainer.regroup
        if regroup is None:
            return
        if self._logbook is not None:
            self._logbook.formed(regroup.leader, regroup.step)
        at, divisions = self._progress.at, self._divisions
        if at is None and not self._world.leads:
            self.entry.note_admission(regroup.members)
        divisions.has_share = divisions.has_share if at is not None else not self.entry.inside
        if at is not None and not self.entry.was_admitted_to(at):
            divisions.has_share = True
        divisions.formed(
            View(f"{regroup.leader}.{regroup.number}", regroup.members, regroup.lost),
            None if at is None else (at.loop, at.epoch),
            ALL if self._progress.is_over else self._progress.taken,
            divides=self._divides,
        )

    def _why_none_is_admitted(self) -> str:
        assert self.loop_progress.optimizer is not None, "a loop has something to train"
        if self.loop_progress.optimizer.has_grown:
            return (
                "its place stays empty, since a replacement would not know the param groups that were added"
            )
        scheduled = any("initial_lr" in group for group in self.loop_progress.optimizer.param_groups)
        if scheduled and not self.loop_progress.kept:
            return (
                "its place stays empty, since a replacement would not know the learning rate: hand the scheduler on, "
                "`group.epochs(n, scheduler)`"
            )
        return ""

    def _awaited(self) -> tuple[int, ...]:
        return self.epochs.present or tuple(range(len(self._world.roles.workers)))

    def _report(self, event: Event) -> None:
        if isinstance(event, Notice) and not isinstance(event, ServerLost):  # the launcher reports those
            print_line(event.text)
        if self._log is not None:
            self._log.on_event(event)

    def report_waiting(self, text: str) -> None:
        """Print the workers for which this one waits; on the coordinator, log it as well."""
        print_line(text)
        if self._log is not None:
            self._log.on_event(Notice(time_s=self._elapsed_s, text=text))


def _parted(values: dict[str, float]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the results of a test among values, those that are missing not numbers, or none; and the other values."""
    names = ("test_loss", "test_top1", "test_top5")
    tested = {name: values.get(name, float("nan")) for name in names} if values.keys() & set(names) else {}
    return tested, {name: value for name, value in values.items() if name not in names}


def print_line(text: str) -> None:
    """Print a line for the user of the run."""
    print(f"polyrhythm: {text}", file=sys.stderr, flush=True)
