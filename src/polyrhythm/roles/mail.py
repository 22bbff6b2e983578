"""The desk of a worker that does not lead: everything goes to the leader by message."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_json, pack_tensors
from polyrhythm.data.dealing.begun import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.events import CacheUsed, WorkerProgress, WorkerTimings
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.line import Line
from polyrhythm.roles.regrouping.group_regroup import GroupRegroup
from polyrhythm.roles.regrouping.member_side import MemberSide
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import join
from polyrhythm.roles.world import LEADER, Departed, World


class Mail:
    """One worker's; see `Desk`.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.

    Attributes:
        job: what is learned; once this worker has been restored or let in, with what others did of it.
    """

    def __init__(self, job: Job, world: World, replica: Replica) -> None:
        self.job = job
        self._line = Line(world, job.strategy)
        self._stop = world.stop
        self._world = world
        self._replica = replica
        self._newest: Message | None = None
        self._behind = 0
        self._regroup: Regroup | None = None
        self.side = MemberSide(self._line, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Has what a new leader would need of this worker; it may have to hand its parameters on at the very end."""
        self._regroup = regroup
        self._line.first = self._introduction

    def wait_among(self, group: GroupRegroup) -> None:
        """Nothing to do: it waits for nobody but a leader, when all is over."""

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, where that is borne."""
        return self._line.bears_loss(loss)

    def restore(self) -> WorkerState | None:
        """Waits for what the leader read from the checkpoint."""
        if not self.job.keeping.resume:
            return None
        message = self._line.control.receive(LEADER)[1]
        self._behind = message.step
        state = WorkerState.from_message(message)
        self.job = self.job.going_on(Begun.from_json(state.begun))
        return state

    def rejoin(self) -> float:
        """Asks the leader to let this worker, a successor, take part."""
        welcome = join(self._world, self._replica, self._line)
        self.job = self.job.going_on(welcome.begun)
        self._line.first = self._introduction
        return welcome.time_s

    def begin(self, epoch: int) -> None:
        """Has all that a new leader would need of this worker from now on."""
        self._line.first = self._introduction

    def entered(self, state: WorkerState) -> None:
        """Sends the state: the leader may be waiting for everyone's."""
        self._hand_in(state)

    def step_done(self) -> None:
        """Leaves, if this worker is to: the step counts, and the next one is the others', or a successor's."""
        self._line.look()
        if self._stop.leave_requested:
            raise Departed("it was asked to")

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        """Sends the event."""
        self._line.send(Message(Kind.EVENT, pack_json(event.to_json())))

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """Sends the state."""
        self._hand_in(state)

    def interrupted(self, state: WorkerState) -> None:
        """Sends the state."""
        self._hand_in(state)

    def end(self, state: WorkerState) -> None:
        """Sends the state, and waits until no leader will need it again."""
        self._hand_in(state)
        if self._regroup is None:
            self._line.await_leave()
            return
        if self._line.leader > self._regroup.leader:  # it said so while there was nothing to hand on
            self._regroup.mend()
        self._line.await_leave(self._regroup.mend)

    def _hand_in(self, state: WorkerState) -> None:
        message = state.message()
        if self._line.bears:
            self._newest = message
        self._line.send(message)

    def _introduction(self) -> list[Message]:
        untrained = pack_tensors(self._replica.untrained, {})
        follows = [] if self._newest is None else [self._newest]
        here = Message(
            Kind.LEAD, untrained, self._world.incarnation, self._behind, weight=float(len(follows))
        )
        return [here, *follows]
