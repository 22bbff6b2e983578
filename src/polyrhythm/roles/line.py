"""A rank's line to the leader, on which nothing is forgotten while the lead changes hands.

rank                          leader (rank 0)
  events, states ───────────▶   dies
  keeps what it has to say      ┆
  ◀────────────────── LEAD ── its successor
  what must come first, then what was kept ─▶
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy

TAG = 3
"""Nothing else that the leader sends can be taken for a word about the lead."""


class Line:
    """One rank's.

    It hears of losses as who receives from anyone does: each is news once, and never again once a successor leads.

    Args:
        world: where the rank is.
        strategy: says whether the others bear the leader's loss.

    Attributes:
        control: the communicator for what is not training.
        away: whether the leader is known to be gone, and no successor has said that it leads.
        leader: how many have led before the one that was last heard to lead.
        bears: whether its loss is borne.
        first: gives what a new leader must hear first.
        call: in which round, and before which step, the leader wants all to regroup.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.control: Communicator = world.control()
        self.away = False
        self.leader = 0
        self.bears = world.goes_on_without(LEADER, strategy)
        self.first: Callable[[], list[Message]] = list
        self.call: tuple[int, int] | None = None
        self._kept: list[Message] = []

    def send(self, message: Message) -> None:
        """Sends a message, or keeps it for the next leader.

        Raises:
            PeerLost: the leader is gone, and its loss is not borne.
        """
        self._kept.append(message)
        if not self.away:
            self._send_kept()

    def answer(self, message: Message) -> None:
        """Sends what the leader has asked for; another will ask again.

        Raises:
            PeerLost: the leader is gone, and its loss is not borne.
        """
        if not self.away:
            with self._bearing_loss():
                self.control.send(LEADER, message)

    def look(self) -> None:
        """Looks whether there is a new leader, or a call; costs little, so that it can be called at every step."""
        while self.bears and (word := self.poll(TAG)) is not None:
            self._heed(word)

    def poll(self, tag: int) -> Message | None:
        """Takes a message of the leader, if one is there.

        Args:
            tag: of the message; nobody else sends any with it.

        Raises:
            PeerLost: the leader is gone, and its loss is not borne.
        """
        while True:
            try:
                found = self.control.poll(None, tag)
            except PeerLost as loss:
                self._note(loss)
                if loss.rank == LEADER and not self.bears:
                    raise
                continue
            return None if found is None else found[1]

    def receive(self, tag: int) -> Message:
        """Waits for a message of the leader.

        Args:
            tag: of the message; nobody else sends any with it.

        Raises:
            PeerLost: the leader is gone.
        """
        while True:
            try:
                return self.control.receive(None, tag)[1]
            except PeerLost as loss:
                self._note(loss)
                if loss.rank == LEADER:
                    raise

    def await_leader(self) -> None:
        """Waits until somebody leads again."""
        while self.away:
            self._hear()

    def bears_loss(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if it is the leader that is lost, and that is borne; gives whether it is."""
        if not self.bears or loss.rank != LEADER:
            return False
        self.look()
        self.await_leader()
        return True

    def await_leave(self, on_lead: Callable[[], None] = lambda: None) -> None:
        """Waits until the leader needs nothing any more of this rank; at once where its loss is not borne.

        Args:
            on_lead: called whenever somebody has said that it leads.
        """
        if self.bears:
            self.await_last_word(on_lead)

    def await_last_word(self, on_lead: Callable[[], None] = lambda: None) -> Message:
        """Waits until the leader lets this rank leave; gives how it says so.

        Args:
            on_lead: called whenever somebody has said that it leads.

        Raises:
            PeerLost: the leader is gone, and its loss is not borne.
        """
        while True:
            word = self._hear()
            if word is None:
                continue
            if word.kind is Kind.LEAVE:
                return word
            if word.kind is Kind.LEAD:
                on_lead()

    def hear_of(self, loss: PeerLost) -> None:
        """Looks what has become of the leader, if it is lost: the news of another communicator may be old here."""
        if loss.rank == LEADER:
            self.look()

    def lose(self) -> None:
        """Notes that the leader is gone."""
        self.away = True

    def look_if_away(self) -> None:
        """Looks whether there is a new leader, if the last one is known to be gone."""
        if self.away:
            self.look()

    def _note(self, loss: PeerLost) -> None:
        self.away |= loss.rank == LEADER

    def _hear(self) -> Message | None:
        """Waits for a word about the lead; gives it, or None: the leader is lost."""
        try:
            word = self.receive(TAG)
        except PeerLost:
            if not self.bears:
                raise
            return None
        self._heed(word)
        return word

    def _heed(self, word: Message) -> None:
        if word.kind is Kind.REGROUP:
            self.call = word.version, word.step
        if word.kind is Kind.LEAD:
            self.away, self.leader, self.call = False, word.version, None
            self._kept[:0] = self.first()
            self._send_kept()

    def _send_kept(self) -> None:
        with self._bearing_loss():
            while self._kept:
                self.control.send(LEADER, self._kept[0])
                self._kept.pop(0)

    @contextmanager
    def _bearing_loss(self) -> Iterator[None]:
        try:
            yield
        except PeerLost:
            if not self.bears:
                raise
            self.away = True
