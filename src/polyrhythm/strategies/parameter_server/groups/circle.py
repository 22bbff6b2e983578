"""A member's group: who is in it now, and its way to the next formation."""

from __future__ import annotations

from contextlib import suppress

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.groups.roster import WORD_TAG, Formation
from polyrhythm.strategies.worker_setting import WorkerSetting


class Circle:
    """One member's side; the first server keeps the list (`roster`).

    Args:
        setting: this worker's.
        number: of the group.
        members: indices of its workers, in order.

    Attributes:
        group: the communicator of those who are there; its rank 0 speaks for them.
        there: their indices among all workers of the run, in the same order.
        everybody: of the group, be they there or not.
        steps: contributions of the group that the servers have, where it is over.
        round: of the present formation.
    """

    def __init__(self, setting: WorkerSetting, number: int, members: range) -> None:
        self.everybody = self.there = tuple(members)
        self.group: Communicator = setting.workers.subgroup(f"replicas {number}", members)
        self.steps = 0
        self.round = 0
        self._name = f"replicas {number}"
        self._network = setting.network
        self._workers = setting.cast.workers
        self._server = setting.cast.servers[0]
        self._incarnation = setting.incarnation

    @property
    def speaks(self) -> bool:
        """Whether this member speaks for the group."""
        return self.group.rank == 0

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let in; the speaker is told."""
        while self.speaks and (found := self._network.poll(self._server, WORD_TAG)) is not None:
            if found[1].kind is Kind.JOIN and found[1].version == self.round:
                return True
        return False

    def break_off(self) -> None:
        """Ends the use of the group's communicator: whoever waits on it hears so, whoever else is lost."""
        for other in range(self.group.size):
            if other != self.group.rank:
                with suppress(PeerLost):
                    self.group.start_send(other, Message(Kind.REVOKE))
        self.group.revoke()

    def go_on(self) -> bool:
        """Goes on with those who are there; gives whether the group does, else its run is over.

        Raises:
            PeerLost: the server is gone.
        """
        self._network.send(self._server, Message(Kind.BROKEN, version=self.round))
        return self._form()

    def enter(self) -> bool:
        """Waits to be let in, as a successor; gives the same as `go_on`.

        Raises:
            PeerLost: the server is gone.
        """
        self._network.send(self._server, Message(Kind.JOIN, version=self._incarnation))
        return self._form()

    def _form(self) -> bool:
        while True:
            word = self._network.receive(self._server, WORD_TAG)[1]
            if word.kind is Kind.LEAVE:
                self.steps = word.step
                return False
            if word.kind is Kind.REGROUP:
                break
        formation = Formation.of(word)
        self.round = formation.round
        self.there = tuple(self._workers.index(rank) for rank in formation.ranks)
        self.group = self._network.regrouped(
            f"{self._name}, {formation.round}", formation.ranks, formation.incarnations
        )
        return True
