"""The worker's end of push and pull where every shard is on two servers."""

from __future__ import annotations

from contextlib import suppress

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.replication.kept_shard import KEPT
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.worker_part import WorkerSetting


class ReplicatedPushPull(PushPull):
    """Exchanges a worker's flat vectors with the servers; where one is lost, with the one that has kept its shard.

    Args:
        setting: the worker's.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting)
        self._own = setting.workers.rank
        self._moved = [False] * len(self._servers)
        self._open: list[Message | None] = [None] * len(self._servers)
        self._sending: dict[int, list[Handle]] = {}
        self._initialising = False

    def initialise(self) -> None:
        """Gives every server its shard; what a server that is lost meanwhile had been given goes to its keeper."""
        self._initialising = True
        for position in range(len(self._servers)):
            for message in self._beginning(position):
                self._send(position, message)
                self._wait(position)

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
            except PeerLost:
                self._move(position)
                continue
            self._open[position] = None
            self._initialising &= any(self._open)
            return answer

    def _address(self, position: int) -> tuple[int, int]:
        """Gives the server that has a shard now, and the tag of its answers."""
        if self._moved[position]:
            return self._servers[(position + 1) % len(self._servers)], KEPT
        return self._servers[position], 0

    def _send(self, position: int, message: Message) -> None:
        """Sends to the server of a shard; to another, if that one is lost."""
        try:
            if self._moved[position]:
                self._relay(position, message)
            else:
                sending = self._network.start_send(self._servers[position], message)
                self._sending.setdefault(position, []).append(sending)
        except PeerLost:
            self._move(position, also=message)

    def _relay(self, position: int, message: Message) -> None:
        """Sends two messages that must arrive next to each other."""
        keeper = self._address(position)[0]
        for other in range(len(self._servers)):
            if self._address(other)[0] == keeper:
                for sending in self._sending.get(other, ()):
                    sending.wait()
        self._network.send(keeper, Message(Kind.RELAY, step=self._own))
        self._network.send(keeper, message)

    def _move(self, position: int, also: Message | None = None) -> None:
        """The server of a shard is lost: asks its keeper from now on, and what is open once more.

        Args:
            position: of the shard.
            also: a message that could not be sent.

        Raises:
            PeerLost: the keeper is lost as well.
        """
        if self._moved[position]:
            raise PeerLost(self._address(position)[0], "asking for a shard whose other server is lost, too")
        self._moved[position] = True
        self._sending[position] = []  # what was under way to the lost one
        again = self._beginning(position) if self._initialising else []
        open_ = self._open[position]
        for message in [*again, *([open_] if open_ is not None else [])]:
            self._send(position, message)
        if also is not None and not again and also is not open_:
            self._send(position, also)


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
