"""A rank's channel to the coordinator; no message is lost while a replacement takes over as coordinator.

rank                              coordinator (rank 0)
  events, states ───────────────▶   dies
  keeps its later messages          ┆
  ◀───────────────── EnterLeader ── its replacement
  introduction, then kept messages ▶
"""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.control_messages import LEADER_TAG, EnterLeader, RegroupAt
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy


class LeaderChannel:
    """One rank's end of the channel.

    Its receives are from any source, so that it gets each `PeerLost` once, and none after a replacement's
    `EnterLeader`.

    Args:
        world: context of the rank.
        strategy: strategy; its fault policy decides whether the run survives the failure of the coordinator.

    Attributes:
        control: communicator for states, reports and events, apart from training.
        leader_lost: whether the coordinator has failed, and no replacement has announced itself.
        leader: generation of the coordinator that announced itself last; 0 for the first.
        survives_leader: whether the run continues when the coordinator fails.
        introduction: returns the first messages to a new coordinator.
        call: request of the coordinator to regroup before a step; None: no such request.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.control: Communicator = world.control()
        self.leader_lost = False
        self.leader = 0
        self.survives_leader = world.continues_without(LEADER, strategy.faults(len(world.roles.workers)))
        self.introduction: Callable[[], list[Message]] = list
        self.call: RegroupAt | None = None
        self._unsent: list[Message] = []

    def send(self, message: Message) -> None:
        """Send a message, or keep it for the next coordinator.

        Raises:
            PeerLost: the coordinator has failed, and the run cannot continue without it.
        """
        self._unsent.append(message)
        if not self.leader_lost:
            self._send_unsent()

    def answer(self, message: Message) -> None:
        """Answer a request of the coordinator; drop the answer where it has failed, since its replacement asks again.

        Raises:
            PeerLost: the coordinator has failed, and the run cannot continue without it.
        """
        if self.leader_lost:
            return
        try:
            self.control.send(LEADER, message)
        except PeerLost as loss:
            self._lose_leader(loss)

    def check(self) -> None:
        """Handle, without waiting, a new coordinator or a request to regroup; cheap enough for every step."""
        while self.survives_leader and (word := self.poll(LEADER_TAG)) is not None:
            self._handle(word)

    def poll(self, tag: int) -> Message | None:
        """Return the next message of the coordinator, or None if none has arrived.

        Args:
            tag: tag of the message, unique to it.

        Raises:
            PeerLost: the coordinator has failed, and the run cannot continue without it.
        """
        while True:
            try:
                found = self.control.poll(None, tag)
            except PeerLost as loss:
                self._note(loss)
                if loss.rank == LEADER and not self.survives_leader:
                    raise
                continue
            return None if found is None else found[1]

    def receive(self, tag: int) -> Message:
        """Wait for a message of the coordinator and return it.

        Args:
            tag: tag of the message, unique to it.

        Raises:
            PeerLost: the coordinator has failed.
        """
        while True:
            try:
                return self.control.receive(None, tag)[1]
            except PeerLost as loss:
                self._note(loss)
                if loss.rank == LEADER:
                    raise

    def await_leader(self) -> None:
        """Wait until a replacement of a failed coordinator has announced itself."""
        while self.leader_lost:
            self._receive_word()

    def recovers_from(self, loss: PeerLost) -> bool:
        """Wait for a new coordinator, if the lost rank led and the run survives that; return whether it does."""
        if not self.survives_leader or loss.rank != LEADER:
            return False
        self.check()
        self.await_leader()
        return True

    def await_last_word(self, on_leader: Callable[[], None] = lambda: None) -> Message:
        """Wait for `MayLeave` or `FinalModel` and return it.

        Args:
            on_leader: callback, called whenever a new coordinator has announced itself.

        Raises:
            PeerLost: the coordinator has failed, and the run cannot continue without it.
        """
        while True:
            word = self._receive_word()
            if word is None:
                continue
            if word.kind in (Kind.LEAVE, Kind.FINAL_MODEL):
                return word
            if word.kind is Kind.LEAD:
                on_leader()

    def note_loss(self, loss: PeerLost) -> None:
        """Check the coordinator after a loss was reported on another communicator; it may be outdated here."""
        if loss.rank == LEADER:
            self.check()

    def mark_leader_lost(self) -> None:
        """Keep messages from now on, until a replacement announces itself."""
        self.leader_lost = True

    def _note(self, loss: PeerLost) -> None:
        self.leader_lost |= loss.rank == LEADER

    def _receive_word(self) -> Message | None:
        """Wait for a message tagged `LEADER_TAG`, handle it and return it; None where the coordinator fails before."""
        try:
            word = self.receive(LEADER_TAG)
        except PeerLost:
            if not self.survives_leader:
                raise
            return None
        self._handle(word)
        return word

    def _handle(self, word: Message) -> None:
        if word.kind is Kind.REGROUP_AT:
            self.call = RegroupAt.from_message(word)
        if word.kind is Kind.LEAD:
            self.leader_lost, self.leader, self.call = False, EnterLeader.from_message(word).generation, None
            self._unsent[:0] = self.introduction()
            self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                self.control.send(LEADER, self._unsent[0])
                self._unsent.pop(0)
        except PeerLost as loss:
            self._lose_leader(loss)

    def _lose_leader(self, loss: PeerLost) -> None:
        """Note that the coordinator has failed, or raise that if the run cannot continue without it."""
        if not self.survives_leader:
            raise loss
        self.leader_lost = True
