"""What ties a worker's own loop to those of the others, beside the steps: epochs, shares of data, means, the end."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from polyrhythm.api.loop.distributed_optimizer import ServerStates
from polyrhythm.api.loop.epochs import EpochProgress, Epochs, LoopEntry
from polyrhythm.api.loop.loop_duties import LoopDuties, load_final_model, meets_every_step
from polyrhythm.api.loop.position import Logbook, LoopProgress
from polyrhythm.api.loop.shard import Host, Seat
from polyrhythm.api.loop.store_board import Ends, Means, StoreBoard
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.errors import RunError
from polyrhythm.events import Event, Notice, ServerLost
from polyrhythm.launch.script import ADMITS_KEY, OVER_KEY, WHOLE_KEY, WorkerStatus, WorkerStatuses
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.control_messages import TakenBatches
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.ledger import Attendance, Ledger
from polyrhythm.roles.member import Member
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.trainer import Trainer
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy

_REPORT_EVERY_S = 0.5


class UserWorkload:
    """What a user's own loop computes; see `Workload`. It keeps its share of the epoch that is under way.

    Args:
        replica: of the user's model.
        regrouped: called after each regrouping of all workers.

    Attributes:
        replica: as given.
    """

    def __init__(self, replica: Replica, regrouped: Callable[[], None]) -> None:
        self.replica = replica
        self._regrouped = regrouped

    def share_out(self, place: int, present: int) -> None:
        """Keep the share of the epoch under way: the next one is dealt out anew."""
        self._regrouped()

    def share_out_apart(self, absent: tuple[int, ...], place: int, present: int) -> None:
        """Keep the share of the epoch under way."""


class Coordination(Host):
    """Keeps one worker's loop together with the others'.

    Args:
        strategy: how the workers share the work.
        world: where this rank is.
        home: this rank's connections.

    Attributes:
        board: in the store, by which workers agree.
        loop_progress: how far this worker's loop has come.
        control: this worker's control plane.
        reform: regroups with whoever is there, between two steps; set once something is distributed.
        entry: how this worker joins the others.
        epochs: of its loop.
        means: over the workers.
        ends: of loops that end after unequal numbers of steps.
        workers: how many share the present epoch, or the last one.
    """

    def __init__(self, strategy: Strategy, world: World, home: Rank) -> None:
        self.loop_progress = LoopProgress()
        self._strategy = strategy
        self._world = world
        self._store = home.rendezvous.store
        ranks = world.roles.workers
        self._worker = ranks.index(world.network.rank)
        self.workers = len(ranks)
        self._replica: Replica | None = None
        self._statuses = WorkerStatuses(self._store, len(ranks), lambda worker: home.is_lost(ranks[worker]))
        self.reform: Callable[[], None] = lambda: None
        self._reported_at_s = -_REPORT_EVERY_S
        self._duties = LoopDuties(world, strategy, self._tell) if world.leads else None
        self.control: Leader | Member = (
            Member(world, strategy, awaits_model=True)
            if self._duties is None
            else self._lead(self._duties, home.rendezvous.met)
        )
        self._reports_batches = not world.leads and not meets_every_step(strategy, len(ranks))
        self.board = StoreBoard(self._store, self._attend)
        faults = strategy.faults(len(ranks))
        awaited = faults.regroups and world.goes_on_without(LEADER, faults)
        self._logbook = Logbook(self.board) if awaited else None
        self._progress = EpochProgress(self.loop_progress, self._logbook)
        self.entry = LoopEntry(world, strategy, self.board, self._statuses, self._progress, self.control)
        self.entry.duties = self._duties
        self.epochs = Epochs(self._worker, self.board, self.loop_progress, self.entry)
        self.means = Means(self._worker, self.board, self._statuses, self._awaited)
        self.ends = Ends(self._worker, self.board, self._statuses)
        self._trainer: Trainer | None = None

    @property
    def server_states(self) -> ServerStates | None:
        """The servers' side of saved states, on the worker that leads."""
        if self._duties is None or not self._world.roles.servers:
            return None
        return ServerStates(self._world, self._strategy.faults(self.workers), self._duties.ask_servers)

    def take(self, replica: Replica) -> Trainer:
        """Take the replica among those of the others; return what keeps it there."""
        self._replica = replica
        workload = UserWorkload(replica, self._formed)
        self._trainer = Trainer(self._world, self._strategy, workload, self.control)
        self.control.replica = replica
        return self._trainer

    def seat(self, shard: int, epoch: int) -> Seat:
        """An iteration over a shard begins: gives this worker's share of it.

        Raises:
            RunError: the others do without this worker.
        """
        trains = torch.is_grad_enabled()  # else it is an evaluation
        if trains and self.loop_progress.optimizer is not None:
            self.loop_progress.optimizer.begin_epoch()
        present: tuple[int, ...] | None = self.epochs.present
        if present is None:
            here = json.dumps(self.entry.present()[0])
            present = tuple(json.loads(self.board.post_if_absent(f"script/deal/{shard}/{epoch}", here)))
        if self._worker not in present:
            raise RunError(f"the others have taken worker {self._worker} for lost, and go on without it")
        self.workers = len(present)
        return Seat(present.index(self._worker), len(present), self._progress.be_seated() if trains else 0)

    def left_out(self, batches: int) -> None:
        self._progress.left_out(batches)

    def took(self, taken: int, of: int) -> None:
        self._progress.took()
        self._report_batches(taken, of)

    def through(self, of: int, *, broken_off: bool) -> None:
        if not broken_off:
            self._report_batches(of, of)
        self._progress.through(broken_off=broken_off)

    def step_begins(self) -> None:
        """A step is about to be taken."""
        self._progress.step_begins()

    def step_done(self) -> None:
        """A step has been taken."""
        self._progress.step_done()
        self.control.after_step()

    def say_who_may_come(self) -> None:
        """Post for the launcher why no successor of a lost worker could enter the loop; empty if one could."""
        if self._duties is not None:
            self.board.post(ADMITS_KEY, self._why_nobody())

    def tell_unseen(self, *, final: bool = False) -> None:
        """Report what lost workers have not taken of their shares, unless successors take it.

        Args:
            final: whether nobody comes any more.
        """
        if self._duties is None:
            return
        statuses = self._statuses.read()
        for worker, left, of in self._duties.unseen:
            never = not self._duties.is_there(worker) if final else statuses[worker] is WorkerStatus.GONE
            if self.entry.waits or never:
                many = "the last" if self._duties.knows else "at most"
                say(
                    f"of worker {worker}, which is lost, {many} {left} of its {of} batches of an epoch are not seen"
                )
        self._duties.unseen.clear()

    def leave(self, replica: Replica, steps: int) -> Counter[int]:
        """Leave with all others; the replica then holds the run's final model.

        Returns:
            How many gradients were applied at which staleness, as far as this worker knows.
        """
        assert self._trainer is not None, "something has been distributed"
        self._progress.leave()
        self._trainer.close()
        account = Account(self._worker, steps, steps, 0, 0, 0.0, replica.bytes_sent, {}, final=True)
        staleness = Counter(replica.part.staleness)
        model = self.control.leave(WorkerState.of(replica, account, {}, to_resume=False))
        assert model is not None, "the leader of a loop hands the final model out"
        load_final_model(replica, model)
        if self._duties is not None:
            staleness.update(self._duties.staleness)
        replica.part.close()
        self.tell_unseen(final=True)
        return staleness

    def _lead(self, duties: LoopDuties, met: Mapping[int, int]) -> Leader:
        """Return the leader, which learns from the store who is there if it comes after another."""
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
        return Leader(replace(self._world, emit=self._tell), self._strategy, duties, ledger)

    def _attend(self) -> None:
        """Regroup while this worker waits for others, where that is asked for."""
        while self.control.attend():
            self.reform()

    def _report_batches(self, taken: int, of: int) -> None:
        """Report now and then, and at an epoch's beginning and end; the leader knows of itself at once."""
        now_s = self._world.clock.now()
        seldom = self._reports_batches and (
            taken in (0, of) or now_s - self._reported_at_s >= _REPORT_EVERY_S
        )
        if seldom or self._duties is not None:
            self._reported_at_s = now_s
            self.control.report(TakenBatches(taken, of))

    def _formed(self) -> None:
        """Note that workers go on in another membership view: a new leader of it asks where."""
        regroup = None if self._trainer is None else self._trainer.regroup
        if self._logbook is not None and regroup is not None:
            self._logbook.formed(regroup.leader, regroup.step)

    def _why_nobody(self) -> str:
        assert self.loop_progress.optimizer is not None, "a loop has something to train"
        scheduled = any("initial_lr" in group for group in self.loop_progress.optimizer.param_groups)
        if scheduled and not self.loop_progress.kept:
            return (
                "its place stays empty, since a successor would not know the learning rate: hand the scheduler on, "
                "`group.epochs(n, scheduler)`"
            )
        return ""

    def _awaited(self) -> tuple[int, ...]:
        return self.epochs.present or tuple(range(len(self._world.roles.workers)))

    def _tell(self, event: Event) -> None:
        if isinstance(event, Notice) and not isinstance(event, ServerLost):  # of which the launcher speaks
            say(event.text)


def say(text: str) -> None:
    """Print a line for whoever started the run."""
    print(f"polyrhythm: {text}", file=sys.stderr, flush=True)
