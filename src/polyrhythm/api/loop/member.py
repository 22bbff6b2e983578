"""The leader as another worker of a user's own loop reaches it: over messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from polyrhythm.api.loop.final_model import FinalModel
from polyrhythm.communication.message import Kind, Message, pack_tensors
from polyrhythm.errors import PeerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.regrouping.remote_formations import RemoteFormations
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_REPORT_EVERY_S = 0.5
LOOP_TAG = 4
"""Tag of the leader's requests to regroup."""


class LoopMember:
    """The coordinator of a worker that does not lead; see `LoopCoordinator`.

    Args:
        world: where this rank is.
        strategy: how the workers share the work.
        reports_batches: whether the leader must be sent how many batches this worker has taken.

    Attributes:
        channel: to whoever leads.
        reform: regroups with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
    """

    def __init__(self, world: World, strategy: Strategy, *, reports_batches: bool) -> None:
        self.reform: Callable[[], None] = lambda: None
        self.regroup: Regroup | None = None
        self._clock = world.clock
        self._incarnation = world.incarnation
        self._reports_batches = reports_batches
        self._reported_at_s = -_REPORT_EVERY_S
        self._replica: Replica | None = None
        self._newest: list[Message] = []
        self.channel = LeaderChannel(world, strategy)
        self.formations = RemoteFormations(self.channel, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits for others."""
        self.regroup = regroup

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, where the run survives the loss of one."""
        return self.channel.recovers_from(loss)

    def introduce(self, replica: Replica) -> None:
        """Makes ready what a new leader would need of this worker."""
        self._replica = replica
        self.channel.introduction = self._introduction

    def read(self) -> None:
        """Checks for a new leader, where workers do not find it by regrouping."""
        if self.regroup is None:
            self.channel.check()

    def attend(self) -> None:
        """Handles what the leader has sent; regroups if it asks for that, is lost, or was replaced."""
        while (word := self.channel.poll(LOOP_TAG)) is not None:
            # A request of an earlier round is over: this worker has regrouped since.
            if self.regroup is not None and word.version == self.regroup.round:
                self.reform()
        self.channel.check()
        if self.regroup is not None and (self.channel.leader_lost or self._leader_changed):
            self.reform()

    def took(self, taken: int, of: int) -> None:
        """Reports to the leader now and then, and at an epoch's beginning and end."""
        now_s = self._clock.now()
        if not self._reports_batches or not (
            taken in (0, of) or now_s - self._reported_at_s >= _REPORT_EVERY_S
        ):
            return
        self._reported_at_s = now_s
        self.channel.send(Message(Kind.TAKEN, step=taken, version=of))

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Sends the last state, and waits for the final model."""
        message = state.message()
        self._newest = [message] if self.channel.survives_leader else []
        self.channel.send(message)
        if self.regroup is None:
            last = self.channel.await_last_word()
        else:
            if self._leader_changed:  # it was said while there was nothing to hand on
                self.regroup.reform()
            last = self.channel.await_last_word(self.regroup.reform)
        FinalModel.of(last).give(replica)
        return Counter()

    @property
    def _leader_changed(self) -> bool:
        """Whether another leads than the one that made this worker's formation."""
        return self.regroup is not None and self.channel.leader > self.regroup.leader

    def _introduction(self) -> list[Message]:
        assert self._replica is not None, "it has been introduced"
        untrained = pack_tensors(self._replica.untrained, {})
        here = Message(Kind.LEAD, untrained, self._incarnation, weight=float(len(self._newest)))
        return [here, *self._newest]
