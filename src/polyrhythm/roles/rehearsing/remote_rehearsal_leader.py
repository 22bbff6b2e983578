"""The leader of a rehearsal as another worker reaches it: by messages."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.errors import PeerLost
from polyrhythm.events import WorkerProgress, WorkerTimings
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.regrouping.regroup import Regroup
from polyrhythm.roles.regrouping.remote_formations import RemoteFormations
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.world import LEADER, World


class RemoteRehearsalLeader:
    """Everything goes to the leader by message; see `RehearsalCoordinator`.

    Args:
        rehearsal: what is rehearsed.
        world: where this rank is.

    Attributes:
        formations: how this worker gets the next formation.
    """

    def __init__(self, rehearsal: Rehearsal, world: World) -> None:
        self._channel = LeaderChannel(world, rehearsal.strategy)
        self._control = self._channel.control
        self._incarnation = world.incarnation
        self._last: Message | None = None
        self._leaving: list[Handle] = []  # a few a worker; a send whose handle is dropped may never arrive
        self._regroup: Regroup | None = None
        self.formations = RemoteFormations(self._channel, world.incarnation)

    def wait_with(self, regroup: Regroup) -> None:
        """Sets what regroups while this worker waits here for others."""
        self._regroup = regroup
        self._channel.introduction = self._introduction

    def recovers_from(self, loss: PeerLost) -> bool:
        """Waits for a new leader, if the lost rank led and the run survives that; gives whether it does."""
        return self._channel.recovers_from(loss)

    def ask_to_enter(self) -> None:
        """Says that it is a successor."""
        self._control.send(LEADER, Message(Kind.JOIN, version=self._incarnation))

    def begin(self, step: int) -> None:
        """Says that it is there when a new leader asks."""
        self._channel.introduction = self._introduction

    def progress(self, event: WorkerProgress | WorkerTimings) -> None:
        """Sends what it has done."""
        message = Message(Kind.EVENT, pack_json(event.to_json()))
        if self._channel.survives_leader:
            self._channel.check()
            self._channel.send(message)
            return
        # Not waited for: what the strategy is sending goes first, and the next step may begin meanwhile.
        self._leaving.append(self._control.start_send(LEADER, message))

    def end(self, account: Account, let_go: Callable[[], None]) -> None:
        """Sends its last words, and waits until the leader needs nothing more of it."""
        for sending in self._leaving:  # the last words are shorter, and might be there first
            sending.wait()
        self._last = Message(Kind.STATE, pack_json(vars(account)))
        self._channel.send(self._last)
        if self._regroup is None:
            self._channel.await_leave()
            return
        if self._channel.leader > self._regroup.leader:  # it announced itself before there was a last message
            self._regroup.reform()
        self._channel.await_leave(self._regroup.reform)

    def _introduction(self) -> list[Message]:
        here = Message(Kind.LEAD, version=self._incarnation)
        return [here] if self._last is None else [here, self._last]
