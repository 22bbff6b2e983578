"""The leader as another worker reaches it: by messages, which wait while a lost leader is replaced."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_json, pack_tensors
from polyrhythm.data.dealing import Begun
from polyrhythm.errors import PeerLost
from polyrhythm.events import CacheUsed, WorkerProgress, WorkerTimings
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.regrouping.regroup import GroupRegroup, Regroup, RemoteFormations
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import join
from polyrhythm.roles.world import LEADER, Departed, World


class RemoteLeader:
    """The coordinator of a worker that does not lead; see `Coordinator`.

    Args:
        job: what is learned.
        world: where this rank is.
        replica: this worker's.

    Attributes:
        job: what is learned; after `restore` or `rejoin` with which part of the data earlier workers have used.
    """

    def __init__(self, job: Job, world: World, replica: Replica) -> None:
        self.job = job
        self._channel = LeaderChannel(world, job.strategy)
        self._stop = world.stop
        self._world = world
        self._replica = replica
        self._latest_state: Message | None = None
        self._behind = 0
        self._regroup: Regroup | None = None
        self.formations = RemoteFormations(self._channel, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups; from now on a new leader gets an introduction, even after this worker's last step."""
        self._regroup = regroup
        self._channel.introduction = self._introduction

    def wait_among(self, group: GroupRegroup) -> None:
        """Does nothing: this worker waits only for a leader, at the end of the run."""

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, where the run survives the loss of one."""
        return self._channel.recovers_from(loss)

    def restore(self) -> WorkerState | None:
        """Receives this worker's part of the checkpoint."""
        if not self.job.keeping.resume:
            return None
        message = self._channel.control.receive(LEADER)[1]
        self._behind = message.step
        state = WorkerState.from_message(message)
        self.job = self.job.going_on(Begun.from_json(state.begun))
        return state

    def rejoin(self) -> float:
        """Asks the leader to let this successor take part."""
        welcome = join(self._world, self._replica, self._channel)
        self.job = self.job.going_on(welcome.begun)
        self._channel.introduction = self._introduction
        return welcome.time_s

    def begin(self, epoch: int) -> None:
        """Introduces itself to any new leader from now on."""
        self._channel.introduction = self._introduction

    def entered(self, state: WorkerState) -> None:
        """Sends the state, since the leader may be waiting for everyone's."""
        self._send_state(state)

    def step_done(self) -> None:
        """Checks for a new leader; leaves if this worker was asked to, with the step that is done counted."""
        self._channel.check()
        if self._stop.leave_requested:
            raise Departed("it was asked to")

    def progress(self, event: WorkerProgress | WorkerTimings | CacheUsed) -> None:
        """Sends the event."""
        self._channel.send(Message(Kind.EVENT, pack_json(event.to_json())))

    def epoch_done(self, epoch: int, state: WorkerState, presented: Tensor | None) -> None:
        """Sends the state."""
        self._send_state(state)

    def interrupted(self, state: WorkerState) -> None:
        """Sends the state."""
        self._send_state(state)

    def end(self, state: WorkerState) -> None:
        """Sends the state, and stays until the leader lets it go, since a new one would ask for it again."""
        self._send_state(state)
        if self._regroup is None:
            self._channel.await_leave()
            return
        if self._channel.leader > self._regroup.leader:  # it announced itself before there was a final state
            self._regroup.reform()
        self._channel.await_leave(self._regroup.reform)

    def _send_state(self, state: WorkerState) -> None:
        message = state.message()
        if self._channel.survives_leader:
            self._latest_state = message
        self._channel.send(message)

    def _introduction(self) -> list[Message]:
        untrained = pack_tensors(self._replica.untrained, {})
        follows = [] if self._latest_state is None else [self._latest_state]
        here = Message(
            Kind.LEAD, untrained, self._world.incarnation, self._behind, weight=float(len(follows))
        )
        return [here, *follows]
