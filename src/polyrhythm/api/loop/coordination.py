"""What ties a worker's own loop to those of the others, beside the steps: epochs, shares of data, means, the end."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from polyrhythm.api.loop.coordinator import LoopCoordinator, LoopLeader, LoopMember, meets_every_step
from polyrhythm.api.loop.distributed_optimizer import ServerStates
from polyrhythm.api.loop.epochs import Epochs, LoopEntry, Progress
from polyrhythm.api.loop.position import Course, Logbook
from polyrhythm.api.loop.shard import Seat
from polyrhythm.api.loop.store_board import Bulletin, Means
from polyrhythm.communication.transports.torch_distributed.rank import Rank
from polyrhythm.errors import RunError
from polyrhythm.events import Event, Notice, ServerLost
from polyrhythm.launch.script import ADMITS_KEY, OVER_KEY, WHOLE_KEY, WorkerStatus, WorkerStatuses
from polyrhythm.roles.keeping.worker_state import Account, WorkerState
from polyrhythm.roles.ledger import Attendance, Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.trainer import Trainer
from polyrhythm.roles.welcome import Welcome
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy


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


class Coordination:
    """Keeps one worker's loop together with the others'.

    Args:
        strategy: how the workers share the work.
        world: where this rank is.
        home: this rank's connections.

    Attributes:
        bulletin: a board in the store by which workers agree.
        course: how far this worker's loop has come.
        coordinator: the leader, or its stand-in here.
        entry: how this worker joins the others.
        epochs: of its loop.
        means: over the workers.
        workers: how many share the present epoch, or the last one.
    """

    def __init__(self, strategy: Strategy, world: World, home: Rank) -> None:
        self.course = Course()
        self._strategy = strategy
        self._world = world
        self._store = home.rendezvous.store
        ranks = world.cast.workers
        self._worker = ranks.index(world.network.rank)
        self.workers = len(ranks)
        self._replica: Replica | None = None
        self._statuses = WorkerStatuses(self._store, len(ranks), lambda worker: home.is_lost(ranks[worker]))
        self._leader = self._lead(home.rendezvous.met) if world.leads else None
        self.coordinator: LoopCoordinator = self._leader or LoopMember(
            world, strategy, reports_batches=not meets_every_step(strategy, len(ranks))
        )
        self.bulletin = Bulletin(self._store, self.coordinator.attend)
        faults = strategy.faults(len(ranks))
        awaited = faults.regroups and world.goes_on_without(LEADER, faults)
        self._logbook = Logbook(self.bulletin) if awaited else None
        self._progress = Progress(self.course, self._logbook)
        self.entry = LoopEntry(
            world, strategy, self.bulletin, self._statuses, self._progress, self.coordinator
        )
        self.epochs = Epochs(self._worker, self.bulletin, self.course, self.entry)
        self.means = Means(self._worker, self.bulletin, self._statuses, self._awaited)
        self._trainer: Trainer | None = None

    @property
    def server_states(self) -> ServerStates | None:
        """The servers' side of saved states, on the worker that leads."""
        if self._leader is None or not self._world.cast.servers:
            return None
        return ServerStates(self._world, self._strategy.faults(self.workers), self._leader.ask_servers)

    def take(self, replica: Replica) -> Trainer:
        """Take the replica among those of the others; return what keeps it there."""
        self._replica = replica
        workload = UserWorkload(replica, self._formed)
        self._trainer = Trainer(self._world, self._strategy, workload, self.coordinator)
        return self._trainer

    def seat(self, shard: int, epoch: int) -> Seat:
        """An iteration over a shard begins: gives this worker's share of it.

        Raises:
            RunError: the others do without this worker.
        """
        trains = torch.is_grad_enabled()  # else it is an evaluation
        if trains and self.course.optimizer is not None:
            self.course.optimizer.begin_epoch()
        present: tuple[int, ...] | None = self.epochs.present
        if present is None:
            here = json.dumps(self.entry.present()[0])
            present = tuple(json.loads(self.bulletin.post_if_absent(f"script/deal/{shard}/{epoch}", here)))
        if self._worker not in present:
            raise RunError(f"the others have taken worker {self._worker} for lost, and go on without it")
        self.workers = len(present)
        return Seat(present.index(self._worker), len(present), self._progress.be_seated() if trains else 0)

    def left_out(self, batches: int) -> None:
        """So many batches of a share need not be taken again."""
        self._progress.left_out(batches)

    def took(self, taken: int, of: int) -> None:
        """One more batch of an epoch is taken, for training, after so many."""
        self._progress.took()
        self.coordinator.took(taken, of)

    def through(self, of: int, *, broken_off: bool) -> None:
        """Nothing more of a share is taken, for training."""
        if not broken_off:
            self.coordinator.took(of, of)
        self._progress.through(broken_off=broken_off)

    def step_begins(self) -> None:
        """A step is about to be taken."""
        self._progress.step_begins()

    def step_done(self) -> None:
        """A step has been taken."""
        self._progress.step_done()
        self.coordinator.read()

    def say_who_may_come(self) -> None:
        """Tells the launcher whether a successor of a lost worker would find its way into the loop, and worker 0's."""
        if self._leader is not None:
            self.bulletin.post(ADMITS_KEY, self._why_nobody())

    def tell_unseen(self, *, final: bool = False) -> None:
        """Says what lost workers have not taken of their shares, unless successors take it.

        Args:
            final: whether nobody comes any more.
        """
        if self._leader is None:
            return
        statuses = self._statuses.read()
        for worker, left, of in self._leader.unseen:
            never = not self._leader.is_there(worker) if final else statuses[worker] is WorkerStatus.GONE
            if self.entry.waits or never:
                many = "the last" if self._leader.knows else "at most"
                _say(
                    f"of worker {worker}, which is lost, {many} {left} of its {of} batches of an epoch are not seen"
                )
        self._leader.unseen.clear()

    def leave(self, replica: Replica, steps: int) -> Counter[int]:
        """Leaves with all others; the replica then holds the run's final model.

        Returns:
            How many gradients were applied at which staleness, as far as this worker knows.
        """
        assert self._trainer is not None, "something has been distributed"
        self._progress.leave()
        self._trainer.close()
        account = Account(self._worker, steps, steps, 0, 0, 0.0, replica.bytes_sent, {}, final=True)
        staleness = Counter(replica.part.staleness)
        staleness.update(
            self.coordinator.leave(WorkerState.of(replica, account, {}, to_resume=False), replica)
        )
        replica.part.close()
        self.tell_unseen(final=True)
        return staleness

    def _lead(self, met: Mapping[int, int]) -> LoopLeader:
        """Makes the coordinator of the leader, which learns from the store who is there if it comes after another."""
        ranks, ledger = self._world.cast.workers, None
        if self._world.rejoins:
            here = [
                worker
                for worker, status in enumerate(self._statuses.read())
                if status in (WorkerStatus.HERE, WorkerStatus.BEHIND)
            ]
            losses = {worker: met.get(rank, 0) for worker, rank in enumerate(ranks)}
            losses[self._worker] = self._world.incarnation
            attendance = Attendance(len(ranks)).to_json() | {
                "present": {self._worker, *here},
                "losses": losses,
            }
            ledger = Ledger(Attendance.from_json(attendance))
        coordinator = LoopLeader(self._world, self._strategy, self._welcome, self._tell, ledger)
        coordinator.over = lambda: self.bulletin.post(OVER_KEY, "")
        coordinator.whole = lambda rank, incarnation: self.bulletin.post(
            f"{WHOLE_KEY}/{rank}/{incarnation}", ""
        )
        return coordinator

    def _formed(self) -> None:
        """Note that workers go on in another membership view: a new leader of it asks where."""
        if self._logbook is not None and self.coordinator.regroup is not None:
            self._logbook.formed(self.coordinator.regroup.leader, self.coordinator.regroup.step)

    def _why_nobody(self) -> str:
        assert self.course.optimizer is not None, "a loop has something to train"
        scheduled = any("initial_lr" in group for group in self.course.optimizer.param_groups)
        if scheduled and not self.course.kept:
            return (
                "its place stays empty, since a successor would not know the learning rate: hand the scheduler on, "
                "`group.epochs(n, scheduler)`"
            )
        return ""

    def _awaited(self) -> tuple[int, ...]:
        return self.epochs.present or tuple(range(len(self._world.cast.workers)))

    def _welcome(self) -> Welcome:
        assert self._replica is not None, "a successor comes when training has begun"
        return Welcome(self._replica.untrained, 0.0)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Notice) and not isinstance(event, ServerLost):  # of which the launcher speaks
            _say(event.text)


def _say(text: str) -> None:
    print(f"polyrhythm: {text}", file=sys.stderr, flush=True)
