"""Pushers that join and leave a server: what its books must know of that, and what a pusher is answered.

PULL ─▶ late: LEAVE ─▶ in step with others: JOIN, at which round? ─▶ wait for the parameters, or ask the gate
"""

from __future__ import annotations

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare
from polyrhythm.strategies.parameter_server.serving.books import Books
from polyrhythm.strategies.parameter_server.serving.gate import Decision, RoundGate

Reply = tuple[int, Message]


class Entrance:
    """Lets pushers in and out of one server, and keeps its books of them consistent.

    Args:
        books: of its pushers; those about who is there are kept here.
    """

    def __init__(self, books: Books) -> None:
        self._gate, self._readings = books.gate, books.readings
        self._presence, self._losses, self._not_finite = books.presence, books.losses, books.not_finite
        self._rounds = self._gate.rounds if isinstance(self._gate, RoundGate) else None

    def ask_for_end(self, source: int) -> None:
        """A pusher asks for the final parameters, which it gets when nobody can change them any more.

        Raises:
            RefusedMessage: it is not the first, who speaks for the run.
        """
        if source != self._presence.pushers[0]:
            raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
        self._presence.final = source

    def let_in(self, source: int) -> list[Reply]:
        """A pusher asks for parameters, perhaps as a successor; gives what it is told in their place, if anything."""
        if not self._presence.is_there(source):  # a successor
            if not self._presence.enter(source):
                return [(source, Message(Kind.LEAVE))]
            pusher = self._presence.numbers[source]
            self._losses.replace(source)
            self._not_finite.forget(pusher)
            self._gate.join(pusher)
        return self.invited(source)

    def invited(self, source: int) -> list[Reply]:
        """Asks a successor among those who go in step at which round it comes in, as long as it has not said so."""
        if self._rounds is None:
            return []
        number = self._rounds.invitation(self._presence.numbers[source])
        return [] if number is None else [(source, Message(Kind.JOIN, step=number))]

    def come_in(self, source: int, message: Message) -> Decision:
        """A successor says at which round it comes in.

        Raises:
            RefusedMessage: there are no rounds, or it cannot come in at this one.
        """
        if not isinstance(self._gate, RoundGate):
            raise RefusedMessage(Reason.KIND, f"rank {source} named a round, and there are none")
        admit_bare(message._replace(step=0))
        return self._gate.enter(self._presence.numbers[source], message.step)

    def wait(self, source: int) -> None:
        """A pusher asks before there are parameters."""
        self._presence.asking.append(source)

    def all_waiting(self) -> list[int]:
        """Gives the ranks that wait for parameters, which wait no more."""
        asking, self._presence.asking = self._presence.asking, []
        return asking

    def shown_out(self, source: int) -> list[Reply]:
        """Tells a pusher that is not there, and has not asked for the final parameters, to leave."""
        gone = not self._presence.is_there(source) and source != self._presence.final
        if gone or self._losses.was_let_go(source):
            return [(source, Message(Kind.LEAVE, stop=self._losses.was_let_go(source)))]
        return []

    def leave(self, source: int) -> Decision:
        """A pusher that was there is gone; gives whom that sets free."""
        pusher = self._presence.numbers[source]
        self._readings.forget(pusher)
        return self._gate.leave(pusher)

    def lose(self, rank: int) -> bool:
        """A pusher is gone without a word; gives whether it was there.

        Raises:
            RunError: more are lost than the consistency can spare.
        """
        if self._presence.is_there(rank):
            self._losses.lose(rank)
        self._losses.check()
        return self._presence.lose(rank)
