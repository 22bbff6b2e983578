"""The desk of a worker that does not lead, in a loop of a user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from polyrhythm.api.loop.final_model import FinalModel
from polyrhythm.communication.message import Kind, Message, pack_tensors
from polyrhythm.errors import PeerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.line import Line
from polyrhythm.roles.regrouping.member_side import MemberSide
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_TELL_EVERY_S = 0.5
LOOP_TAG = 4
"""Nothing else that the leader sends a worker can be taken for its call to regroup."""


class LoopMember:
    """One worker's; see `LoopDesk`.

    Args:
        world: where this rank is.
        strategy: how the workers share the work.
        tells: whether the leader cannot know by itself how many batches this worker has taken.

    Attributes:
        line: to whoever leads.
        mend: goes on with whoever is there, between two steps; set where workers regroup.
        regroup: of this worker, where workers regroup.
    """

    def __init__(self, world: World, strategy: Strategy, *, tells: bool) -> None:
        self.mend: Callable[[], None] = lambda: None
        self.regroup: Regroup | None = None
        self._clock = world.clock
        self._incarnation = world.incarnation
        self._tells = tells
        self._told_at_s = -_TELL_EVERY_S
        self._replica: Replica | None = None
        self._newest: list[Message] = []
        self.line = Line(world, strategy)
        self.side = MemberSide(self.line, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others."""
        self.regroup = regroup

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, where that is borne."""
        return self.line.bears_loss(loss)

    def introduce(self, replica: Replica) -> None:
        """Has what another leader would need of this worker from now on."""
        self._replica = replica
        self.line.first = self._introduction

    def heed(self) -> None:
        """Looks whether another leads, where workers do not regroup with it anyway."""
        if self.regroup is None:
            self.line.look()

    def attend(self) -> None:
        """Takes what the leader has sent; regroups if it calls, or is lost, or another leads."""
        while (word := self.line.poll(LOOP_TAG)) is not None:
            # One that has gone on with a later formation is not called any more.
            if self.regroup is not None and word.version == self.regroup.round:
                self.mend()
        self.line.look()
        if self.regroup is not None and (self.line.away or self._is_called):
            self.mend()

    def took(self, taken: int, of: int) -> None:
        """Tells the leader, now and then, and at an epoch's beginning and end."""
        now_s = self._clock.now()
        if not self._tells or not (taken in (0, of) or now_s - self._told_at_s >= _TELL_EVERY_S):
            return
        self._told_at_s = now_s
        self.line.send(Message(Kind.TAKEN, step=taken, version=of))

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Hands in the last state, and waits for the final model."""
        message = state.message()
        self._newest = [message] if self.line.bears else []
        self.line.send(message)
        if self.regroup is None:
            last = self.line.await_last_word()
        else:
            if self._is_called:  # it was said while there was nothing to hand on
                self.regroup.mend()
            last = self.line.await_last_word(self.regroup.mend)
        FinalModel.of(last).give(replica)
        return Counter()

    @property
    def _is_called(self) -> bool:
        """Whether another leads than the one who has made this worker's formation."""
        return self.regroup is not None and self.line.leader > self.regroup.leader

    def _introduction(self) -> list[Message]:
        assert self._replica is not None, "it has been introduced"
        untrained = pack_tensors(self._replica.untrained, {})
        here = Message(Kind.LEAD, untrained, self._incarnation, weight=float(len(self._newest)))
        return [here, *self._newest]
