"""Links of a worker with shards that are on two servers each; see `replicated_server`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import (
    Kind,
    Message,
)
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.parameter_server.replication.messages import GREETING, KEPT, Relay
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.own_model import FreeLink
from polyrhythm.strategies.parameter_server.serving.push_pull import OverlappedPushPull, PushPull, ServerLink
from polyrhythm.strategies.worker_part import WorkerSetting

_PATIENCE_S, _PAUSE_S = 3.0, 0.01
"""Seconds that a shard may be without a server: a rank that was away while servers changed is notified of all
changes at once, and of the present ones last.
"""


class ReplicatedLink(ServerLink):
    """Part of a link with shards on two servers: where one is lost, it is that with the one that has kept its shard."""

    def __init__(self, setting: WorkerSetting, *more: Any, **options: Any) -> None:
        super().__init__(setting, *more, **options)
        self._own = setting.workers.rank
        self._with_keeper = [False] * len(self._servers)
        self._announces = [False] * len(self._servers)
        self._open: list[Message | None] = [None] * len(self._servers)
        self._sending: dict[int, list[Handle]] = {}
        self._initializing = False
        self._losses: Counter[int] = Counter()

    def initialize(self) -> None:
        """Give every server its shard; the shard of a server that is lost in the meantime goes to its keeper."""
        self._initializing = True
        for position in range(len(self._servers)):
            for message in self._beginning(position):
                self._send(position, message)
                self._wait(position)

    def check_losses(self) -> None:
        for position in range(len(self._servers)):
            try:
                while self._network.poll(self._address(position)[0], GREETING) is not None:
                    pass
            except PeerLost as loss:
                self._move(position, loss)
        for server in self._servers:  # also those without an open request
            self._note_loss(server)

    def leave(self) -> None:
        """Notify all servers that no push follows, and wait until both of each shard know it."""
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
        _Sent(self._sending.setdefault(position, [])).wait()

    def _answer(self, position: int) -> Message:
        while True:
            server, tag = self._address(position)
            try:
                _, answer = self._network.receive(server, tag)
            except PeerLost as loss:
                self._move(position, loss)
                continue
            if answer.kind is Kind.RELAY:  # a replacement of the server, which only follows
                self._ask_other(position)
                continue
            self._open[position] = None
            self._initializing &= any(self._open)
            return answer

    def _address(self, position: int) -> tuple[int, int]:
        if self._with_keeper[position]:
            return self._servers[(position + 1) % len(self._servers)], KEPT
        return self._servers[position], 0

    def _send(self, position: int, message: Message) -> None:
        try:
            self._send_to_server(position, message)
        except PeerLost as loss:
            self._move(position, loss, also=message)

    def _send_to_server(self, position: int, message: Message) -> None:
        """Send to the server of a shard; one that is asked because another is lost is notified of that before."""
        server = self._address(position)[0]
        if not self._announces[position]:
            self._sending.setdefault(position, []).append(self._network.start_send(server, message))
            return
        for other in range(len(self._servers)):  # the two messages must arrive next to each other
            if self._address(other)[0] == server:
                for sending in self._sending.get(other, ()):
                    sending.wait()
        losses = self._losses[self._other(position)]
        self._network.send(server, Relay(position, self._own, losses).message())
        self._network.send(server, message)

    def _other(self, position: int) -> int:
        return self._servers[(position + (not self._with_keeper[position])) % len(self._servers)]

    def _move(self, position: int, loss: PeerLost, also: Message | None = None) -> None:
        """Ask others for all that a lost server had, and what is open once more.

        One of them may be the replacement of a server that was lost before, and has its shards again. `also` is
        a message
        that could not be sent. Raise `PeerLost` if both servers of a shard are lost, and no replacement is known.
        """
        moved, losses = self._leave_server(position, loss), 1
        clock = self._network.clock
        given_up_at = clock.now() + _PATIENCE_S
        while moved:
            asked = moved[0]
            try:
                self._ask_again(asked, also if asked == position else None)
                moved = moved[1:]
            except PeerLost as again:
                losses += 1
                if losses > 2 * len(self._servers):
                    if clock.now() >= given_up_at:
                        raise
                    clock.sleep(_PAUSE_S)
                moved = sorted({*moved, *self._leave_server(asked, again)})

    def _leave_server(self, position: int, loss: PeerLost) -> list[int]:
        """Return all shards that were asked for where this one was; from now on they are asked for elsewhere."""
        lost = self._address(position)[0]
        self._losses[lost] = max(self._losses[lost], loss.losses)
        self._note_loss(lost)
        moved = [each for each in range(len(self._servers)) if self._address(each)[0] == lost]
        for each in moved:
            self._turn(each)
        return moved

    def _ask_other(self, position: int) -> None:
        self._turn(position)
        try:
            self._ask_again(position)
        except PeerLost as loss:
            self._move(position, loss)

    def _turn(self, position: int) -> None:
        self._with_keeper[position] = not self._with_keeper[position]
        self._announces[position] = True
        self._sending[position] = []  # messages in transit to the lost one

    def _ask_again(self, position: int, also: Message | None = None) -> None:
        again = self._beginning(position) if self._initializing else []
        pending = self._pending(position)
        for message in [*again, *pending]:
            self._send_to_server(position, message)
        if also is not None and not again and not any(also is each for each in pending):
            self._send_to_server(position, also)

    def _pending(self, position: int) -> list[Message]:
        """Return the messages that one of both servers may lack, in their order."""
        open_ = self._open[position]
        return [] if open_ is None else [open_]

    def _note_loss(self, server: int) -> None:
        """Take note that a server is lost, and of a replacement's greeting: else nothing could be sent to that one."""
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
        """Return whether everything has left."""
        return all(sending.done() for sending in self._sending)

    def wait(self) -> None:
        """Wait until everything has left."""
        while self._sending:
            with suppress(PeerLost):
                self._sending.pop().wait()


class ReplicatedPushPull(ReplicatedLink, PushPull):
    """Exchanges a worker's flat vectors with servers, as `PushPull` does."""


class ReplicatedFreeLink(ReplicatedLink, FreeLink):
    """As `FreeLink`; a push is kept until an answer states that both servers have it."""

    def __init__(self, setting: WorkerSetting, *more: Any, **options: Any) -> None:
        super().__init__(setting, *more, **options)
        self._unconfirmed: list[list[Message]] = [[] for _ in self._servers]

    def _ask(self, position: int, message: Message) -> Handle:
        if message.kind is not Kind.PUSH:
            return super()._ask(position, message)
        kept = message._replace(tensor=payload(message).clone())
        self._unconfirmed[position].append(kept)
        self._send(position, kept)
        return _Sent(self._sending.setdefault(position, []))

    def _answer(self, position: int) -> Message:
        answer = super()._answer(position)
        if answer.kind is Kind.PARAMETERS:
            unconfirmed = self._unconfirmed[position]
            unconfirmed[:] = [push for push in unconfirmed if push.step >= answer.step]
        return answer

    def _pending(self, position: int) -> list[Message]:
        return [*self._unconfirmed[position], *super()._pending(position)]


class OverlappedReplicatedPushPull(OverlappedPushPull, ReplicatedPushPull):
    """Pushes and pulls in parts, of shards that are on two servers.

    If the server of a shard is lost during a push to it, the whole push goes to the other one, in one piece;
    if it is lost during its answer, the other one answers again.
    """

    def _ask(self, position: int, message: Message) -> Handle:
        kind, tensor = message.kind, message.tensor
        if kind not in (Kind.PART, Kind.PUSH):
            return super()._ask(position, message)
        if kind is Kind.PUSH and tensor is not None and len(tensor) < self._sizes[position]:
            gradients = self._flat.gradients[self._shards[position]]
            self._open[position] = message._replace(tensor=gradients)
        elif kind is Kind.PUSH:
            self._open[position] = message
        try:
            self._send_to_server(position, message)
        except PeerLost as loss:
            self._move(position, loss)
        return _Sent(self._sending.setdefault(position, []))

    def _answer(self, position: int) -> Message:
        asked = self._open[position]
        answer = super()._answer(position)
        self._request_until_complete(position, asked)
        return answer

    def _take_part(self, position: int) -> None:
        asked = self._open[position]
        super()._take_part(position)
        self._request_until_complete(position, asked)

    def _request_until_complete(self, position: int, asked: Message | None) -> None:
        """Repeat a request if its server is lost while parts of the answer are missing."""
        if asked is not None and self._awaited[position]:  # both servers have the gradient
            self._open[position] = asked._replace(tensor=payload(asked)[:0])

    def _turn(self, position: int) -> None:
        super()._turn(position)
        if 0 <= self._unpushed[position] < self._sizes[position]:
            self._unpushed[position] = self._sizes[position]
            self._cuts[position] = []
            self._in_one_piece.add(position)
