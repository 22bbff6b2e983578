"""What servers report to the leader: states of their shards, final reports, and which servers are lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from polyrhythm.communication.message import Kind, Message, unpack_json, unpack_tensors
from polyrhythm.errors import PeerLost
from polyrhythm.events import Event, ServerJoined, ServerLost
from polyrhythm.roles.server_attendance import ServerAttendance, ServerLosses
from polyrhythm.roles.world import World
from polyrhythm.strategies.state import State
from polyrhythm.strategies.strategy import Strategy


class ServerReports:
    """Asks servers for what the leader needs, and collects it.

    Args:
        world: where it is.
        strategy: says which shards each server holds, and which losses the run survives.
        losses: so far.
        say: emits an event of the leader's, and sets its time.
        read_until: handles messages until a condition holds.

    Attributes:
        attendance: of the servers.
        reports: every server's final report, by its rank.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        losses: ServerLosses,
        say: Callable[[Event], None],
        read_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.attendance = ServerAttendance(world.cast.servers, strategy, losses)
        self.reports: dict[int, dict[str, Any]] = {}
        self._world = world
        self._say = say
        self._read_until = read_until
        self._states: dict[int, State] | None = None

    def wait(self) -> None:
        """Waits for the final report of every server, sent once it has been let go."""
        self._read_until(lambda: all(rank in self.reports for rank in self.attendance.present))

    def ask(self) -> list[State]:
        """Gives the state of every shard, asked of the servers that hold it now."""
        shards = range(len(self._world.cast.servers))
        found = self._states = {}
        for shard in shards:
            self._ask_for(shard)
        self._read_until(lambda: len(found) == len(shards))
        self._states = None
        return [found[shard] for shard in shards]

    def on_message(self, source: int, message: Message) -> None:
        """Takes a server's final report, or a shard's state if one was asked for."""
        assert message.tensor is not None, "both carry a payload"
        if message.kind is Kind.REPORT:
            self.reports[source] = unpack_json(message.tensor)
        elif self._states is not None:
            self._states[message.step] = unpack_tensors(message.tensor)

    def lose(self, rank: int) -> None:
        """Notes that a server is lost, unless it had sent its final report; asks others for shards that it still owed.

        Raises:
            PeerLost: nobody has kept its shard.
        """
        if rank in self.reports or not self.attendance.lose(rank):
            return
        name = self.attendance.name(rank)
        self._say(
            ServerLost(time_s=0, text=f"{name} is lost; who has kept its shard goes on with it", rank=rank)
        )
        if self._states is not None:
            for shard in self.attendance.shards_of(rank):
                if shard not in self._states:
                    self._ask_for(shard)

    def enter(self, rank: int) -> None:
        """Notes that a successor of a lost server has all of its shards."""
        self.attendance.losses.join(rank)
        text = f"{self.attendance.name(rank)} is there again, and has its shards from its neighbours"
        self._say(ServerJoined(time_s=0, text=text, rank=rank))

    def _ask_for(self, shard: int) -> None:
        with suppress(PeerLost):  # as is heard on the other communicator as well, and then others are asked
            self._world.network.send(self.attendance.holder(shard), Message(Kind.CHECKPOINT, step=shard))
