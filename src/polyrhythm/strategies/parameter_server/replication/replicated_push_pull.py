"""The worker's end of push and pull where every shard is on two servers."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.replication.replicated_server import GREETING, KEPT
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.worker_part import WorkerSetting

_PATIENCE_S, _PAUSE_S = 3.0, 0.01
"""How long a shard may have no server: who was away while servers came and went hears of all of that at once, and of
those who are there now last."""


class ReplicatedPushPull(PushPull):
    """Exchanges a worker's flat vectors with the servers; where one is lost, with the one that has kept its shard.

    Args:
        setting: the worker's.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting)
        self._own = setting.workers.rank
        self._with_keeper = [False] * len(self._servers)
        self._announces = [False] * len(self._servers)
        self._open: list[Message | None] = [None] * len(self._servers)
        self._sending: dict[int, list[Handle]] = {}
        self._initialising = False
        self._losses: Counter[int] = Counter()

    def initialise(self) -> None:
        """Gives every server its shard; what a server that is lost meanwhile had been given goes to its keeper."""
        self._initialising = True
        for position in range(len(self._servers)):
            for message in self._beginning(position):
                self._send(position, message)
                self._wait(position)

    def check_losses(self) -> None:
        """Takes note of servers that were lost while nothing was asked of them, as if they had been asked."""
        for position in range(len(self._servers)):
            try:
                while self._network.poll(self._address(position)[0], GREETING) is not None:
                    pass
            except PeerLost as loss:
                self._move(position, loss)
        for server in self._servers:  # of which nothing may be asked, and which are asked for what they keep
            self._hear_of_loss(server)

    def leave(self) -> None:
        """Tells all servers that nothing more will be pushed, and waits until both of each shard know it."""
        for position in range(len(self._servers)):
            self._ask(position, Message(Kind.LEAVE))
            self._wait(position)
        for position in range(len(self._servers)):
            self._answer(position)

    def _ask(self, position: int, message: Message) -> Handle:
        self._open[position] = message
        self._send(position, message)
        return _Sent(self._sending.setdefault(position, []))

    def _wait(self, position: int) -> None:
        """Waits until all about a shard has left."""
        _Sent(self._sending.setdefault(position, [])).wait()

    def _answer(self, position: int) -> Message:
        while True:
            server, tag = self._address(position)
            try:
                _, answer = self._network.receive(server, tag)
            except PeerLost as loss:
                self._move(position, loss)
                continue
            if answer.kind is Kind.RELAY:  # a successor of the server, which only follows
                self._ask_other(position)
                continue
            self._open[position] = None
            self._initialising &= any(self._open)
            return answer

    def _address(self, position: int) -> tuple[int, int]:
        """Gives the server that has a shard now, and the tag of its answers."""
        if self._with_keeper[position]:
            return self._servers[(position + 1) % len(self._servers)], KEPT
        return self._servers[position], 0

    def _send(self, position: int, message: Message) -> None:
        """Sends to the server of a shard; to another, if that one is lost."""
        try:
            self._send_there(position, message)
        except PeerLost as loss:
            self._move(position, loss, also=message)

    def _send_there(self, position: int, message: Message) -> None:
        """Sends to the server that has a shard; one that is asked since another is lost is told so before."""
        server = self._address(position)[0]
        if not self._announces[position]:
            self._sending.setdefault(position, []).append(self._network.start_send(server, message))
            return
        for other in range(len(self._servers)):  # the two messages must arrive next to each other
            if self._address(other)[0] == server:
                for sending in self._sending.get(other, ()):
                    sending.wait()
        losses = float(self._losses[self._other(position)])
        self._network.send(server, Message(Kind.RELAY, step=self._own, version=position, weight=losses))
        self._network.send(server, message)

    def _other(self, position: int) -> int:
        """Gives the server that is not asked for a shard now."""
        return self._servers[(position + (not self._with_keeper[position])) % len(self._servers)]

    def _move(self, position: int, loss: PeerLost, also: Message | None = None) -> None:
        """The server of a shard is lost: asks the others for all that it had from now on, and what is open once more.

        One of them may be the successor of a server that was lost before, and has its shards again.

        Args:
            position: of the shard.
            loss: of its server, or of that one's predecessor.
            also: a message that could not be sent.

        Raises:
            PeerLost: both servers of a shard are lost, and no successor is heard of.
        """
        moved, losses = self._leave_server(position, loss), 1
        clock = self._network.clock
        given_up_at = clock.now() + _PATIENCE_S
        while moved:
            asked = moved[0]
            try:
                self._ask_anew(asked, also if asked == position else None)
                moved = moved[1:]
            except PeerLost as again:
                losses += 1
                if losses > 2 * len(self._servers):
                    if clock.now() >= given_up_at:
                        raise
                    clock.sleep(_PAUSE_S)
                moved = sorted({*moved, *self._leave_server(asked, again)})

    def _leave_server(self, position: int, loss: PeerLost) -> list[int]:
        """Gives all shards that were asked for where this one was; from now on they are asked for elsewhere."""
        lost = self._address(position)[0]
        self._losses[lost] = max(self._losses[lost], loss.losses)
        self._hear_of_loss(lost)
        moved = [each for each in range(len(self._servers)) if self._address(each)[0] == lost]
        for each in moved:
            self._turn(each)
        return moved

    def _ask_other(self, position: int) -> None:
        self._turn(position)
        try:
            self._ask_anew(position)
        except PeerLost as loss:
            self._move(position, loss)

    def _turn(self, position: int) -> None:
        self._with_keeper[position] = not self._with_keeper[position]
        self._announces[position] = True
        self._sending[position] = []  # what was under way to the lost one

    def _ask_anew(self, position: int, also: Message | None = None) -> None:
        again = self._beginning(position) if self._initialising else []
        open_ = self._open[position]
        for message in [*again, *([open_] if open_ is not None else [])]:
            self._send_there(position, message)
        if also is not None and not again and also is not open_:
            self._send_there(position, also)

    def _hear_of_loss(self, server: int) -> None:
        """Takes note that a server is lost, and of a successor's greeting: else nothing could be sent to that one."""
        try:
            while self._network.poll(server, GREETING) is not None:
                pass
        except PeerLost as loss:
            self._losses[server] = max(self._losses[server], loss.losses)


class _Sent:
    """All that is being sent about a shard; what is lost with its receiver has been sent to another."""

    def __init__(self, sending: list[Handle]) -> None:
        self._sending = sending

    def done(self) -> bool:
        """Whether everything has left."""
        return all(sending.done() for sending in self._sending)

    def wait(self) -> None:
        """Waits until everything has left."""
        while self._sending:
            with suppress(PeerLost):
                self._sending.pop().wait()
