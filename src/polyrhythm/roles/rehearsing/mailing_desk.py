"""The desk of all workers of a rehearsal but the leader."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.errors import PeerLost
from polyrhythm.events import WorkerProgress, WorkerTimings
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.line import Line
from polyrhythm.roles.regrouping.member_side import MemberSide
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.world import LEADER, World


class MailingDesk:
    """Everything goes to the leader by message; see `RehearsalDesk`.

    Args:
        rehearsal: what is rehearsed.
        world: where this rank is.

    Attributes:
        side: how this worker comes to the next formation.
    """

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        self._line = Line(world, rehearsal.strategy)
        self._control = self._line.control
        self._incarnation = world.incarnation
        self._last: Message | None = None
        self._leaving: list[Handle] = []  # a few a worker; a send whose handle is dropped may never arrive
        self._regroup: Regroup | None = None
        self.side = MemberSide(self._line, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Lets workers regroup while this one waits for others here."""
        self._regroup = regroup
        self._line.first = self._introduction

    def bears(self, loss: PeerLost) -> bool:
        """Waits until another leads, if it is the leader that is lost, and that is borne; gives whether it is."""
        return self._line.bears_loss(loss)

    def ask_to_enter(self) -> None:
        """Says that it is a successor."""
        self._control.send(LEADER, Message(Kind.JOIN, version=self._incarnation))

    def begin(self, step: int) -> None:
        """Says that it is there when a new leader asks."""
        self._line.first = self._introduction

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """Sends what it has done."""
        message = Message(Kind.EVENT, pack_json(event.to_json()))
        if self._line.bears:
            self._line.look()
            self._line.send(message)
            return
        # Not waited for: what the strategy is sending goes first, and the next step may begin meanwhile.
        self._leaving.append(self._control.start_send(LEADER, message))

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """Sends its last words, and waits until the leader needs nothing more of it."""
        for sending in self._leaving:  # the last words are shorter, and might be there first
            sending.wait()
        self._last = Message(Kind.STATE, pack_json(vars(account)))
        self._line.send(self._last)
        if self._regroup is None:
            self._line.await_leave()
            return
        if self._line.leader > self._regroup.leader:  # it said so while there was nothing to hand on
            self._regroup.mend()
        self._line.await_leave(self._regroup.mend)

    def _introduction(self) -> list[Message]:
        here = Message(Kind.LEAD, version=self._incarnation)
        return [here] if self._last is None else [here, self._last]
