"""How the leader makes the next formation: it waits for all who are there, and tells them who goes on.

Who has left, or is about to, is not waited for. But a leader that has just come holds nothing, and at the very end
there may be nobody else to have it from: those who only wait for leave to go take part once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polyrhythm.communication.message import Kind, Message
from polyrhythm.roles.attendance import Attendance
from polyrhythm.roles.leader_channel import TAG
from polyrhythm.roles.regrouping.formation import NOTHING, Broken, Formation
from polyrhythm.roles.regrouping.muster import Muster
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy


class LeaderMessages(Protocol):
    """What making formations needs of the leader's messages.

    Attributes:
        attendance: of the workers.
    """

    attendance: Attendance

    def read(self) -> None:
        """Handles the messages that have arrived, without waiting."""

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Handles messages as they arrive, until `enough` gives true."""

    def is_final(self, worker: int) -> bool:
        """Whether a worker has sent its final state."""

    def send_if_there(self, rank: int, message: Message) -> None:
        """Sends a message, unless that rank is lost."""


class Assembly:
    """Makes formations on the leader, for all workers; see `FormationSource`.

    Args:
        world: where it is.
        strategy: says whether others listen for a leader's word between steps.
        messages: between the leader and the workers.

    Attributes:
        muster: who waits.
        left: workers that have left in good order.
    """

    def __init__(self, world: World, strategy: Strategy, messages: LeaderMessages) -> None:
        self._world = world
        self._calls = world.goes_on_without(LEADER, strategy)
        self._called: int | None = None
        self._messages = messages
        self.muster = Muster(len(world.cast.workers), world.incarnation)
        self.left: set[int] = set()

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether somebody is let in before this step, or before the next: all are called, so nobody loses one."""
        self._messages.read()
        if self.muster.broken_off:
            return True
        if self._called is None and self.muster.due:
            self._called = step
            if wait and self._calls:
                self._called += 1
                self._call(Message(Kind.REGROUP, version=round_, step=self._called, tag=TAG))
        return self._called is not None and step >= self._called

    def first_formation(self) -> Formation:
        """Makes the first one of a leader that has just come."""
        return self.next_formation(Broken(round=0, done=NOTHING, incarnation=self._world.incarnation))

    def next_formation(self, word: Broken) -> Formation:
        """Waits until all who are there have broken their step off, come or left; tells them who goes on."""
        self._called = None
        awaited, called = self._staying, set[int]()
        if word.done == NOTHING:
            awaited = self._there

        def complete() -> bool:
            if word.done == NOTHING and self.muster.called:
                called.update(self._call_back(but=called))
            return self.muster.complete(awaited())

        self._messages.read_until(complete)
        formation = self.muster.form(word.done, awaited())
        for worker in formation.workers[1:]:
            self._messages.send_if_there(self._world.cast.workers[worker], formation.message())
        return formation

    def _call(self, word: Message) -> None:
        for worker in self._staying() - {LEADER}:
            self._messages.send_if_there(self._world.cast.workers[worker], word)

    def _staying(self) -> set[int]:
        """Gives the workers that are there, and have not said that they leave."""
        present = self._messages.attendance.present
        return {worker for worker in present if not self._messages.is_final(worker)}

    def _there(self) -> set[int]:
        """Gives the workers that are there."""
        return self._messages.attendance.present - self.left

    def _call_back(self, but: set[int]) -> set[int]:
        """Calls those who were through with this leader's last formation, and only wait for leave to go."""
        through = {
            worker
            for worker in self.muster.formation.workers
            if worker not in but and self._messages.is_final(worker) and not self.muster.waits(worker)
        }
        for worker in through:
            word = Message(Kind.LEAD, version=self._world.incarnation, tag=TAG)
            self._messages.send_if_there(self._world.cast.workers[worker], word)
        return through
