"""The desk of a worker that does not lead, in a loop of a user's own."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from polyrhythm.api.loop.final_model import FinalModel
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.line import Line
from polyrhythm.roles.regrouping.member_side import MemberSide
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy

_TELL_EVERY_S = 0.5
LOOP_TAG = 4
"""Nothing else that the leader sends a worker can be taken for a word about the loop."""


class LoopMember:
    """One worker's; see `LoopDesk`.

    Args:
        world: where this rank is.
        strategy: how the workers share the work.
        tells: whether the leader cannot know by itself how many batches this worker has taken.
    """

    def __init__(self, world: World, strategy: Strategy, *, tells: bool) -> None:
        self._clock = world.clock
        self._tells = tells
        self._told_at_s = -_TELL_EVERY_S
        line = Line(world, strategy)
        self._control = line.control
        self.side = MemberSide(line, world.incarnation)
        self._regroup: Regroup | None = None
        self._means: dict[int, Tensor] = {}
        self._final: FinalModel | None = None
        self._left = False

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for the leader."""
        self._regroup = regroup

    def bears(self, loss: PeerLost) -> bool:
        """Never: without worker 0 the loops end."""
        return False

    def heed(self) -> None:
        """Takes what the leader has sent; regroups if it calls."""
        while (found := self._control.poll(LEADER, LOOP_TAG)) is not None:
            self._take(found[1])

    def mean(self, number: int, total: Tensor) -> Tensor:
        """Sends this worker's part, and waits for the sum."""
        self._control.send(LEADER, Message(Kind.MEAN, total, step=number))
        while number not in self._means:
            self._hear()
        return self._means[number]

    def took(self, taken: int, of: int) -> None:
        """Tells the leader, now and then, and at an epoch's beginning and end."""
        now_s = self._clock.now()
        if not self._tells or not (taken in (0, of) or now_s - self._told_at_s >= _TELL_EVERY_S):
            return
        self._told_at_s = now_s
        self._control.send(LEADER, Message(Kind.TAKEN, step=taken, version=of))

    def leave(self, state: WorkerState, replica: Replica) -> Counter[int]:
        """Hands in the last state, and waits for the final model."""
        self._left = True
        self._control.send(LEADER, state.message())
        while self._final is None:
            self._hear()
        self._final.give(replica)
        return Counter()

    def _hear(self) -> None:
        self._take(self._control.receive(LEADER, LOOP_TAG)[1])

    def _take(self, message: Message) -> None:
        if message.kind is Kind.BROKEN:
            # One that has gone on with a later formation, or has left, is not called any more.
            if self._regroup is not None and not self._left and message.version == self._regroup.round:
                self._regroup.mend()
            return
        assert message.tensor is not None, "every other word of the leader carries a payload"
        if message.kind is Kind.MEAN:
            self._means[message.step] = message.tensor
        else:
            self._final = FinalModel.of(message)
