"""Carries out what a server's gate decides: updates the shard, and answers the pushers.

    decision ─▶ drop ─▶ apply: merge, aggregate, optimiser step, version + 1 ─▶ answer, or acknowledge
                           └─ where whole gradients are compared: only once all servers have agreed

`ShardServer` decides which messages are taken and asks the gate; here is what follows from the gate's decision.
"""

from __future__ import annotations

from torch import Tensor

from polyrhythm.communication.message import Kind, Message, message_of
from polyrhythm.strategies.parameter_server.serving.books import Books
from polyrhythm.strategies.parameter_server.serving.comparison import Comparison
from polyrhythm.strategies.parameter_server.serving.gate import Decision, RoundGate
from polyrhythm.strategies.parameter_server.serving.shard import Pushed
from polyrhythm.strategies.parameter_server.serving.updates import Updates

Reply = tuple[int, Message]
_PARAMETERS = Kind.PARAMETERS  # an enum is slow to ask for its members


class DecisionExecutor:
    """Updates one server's shard as its gate decides, and makes the answers.

    Args:
        books: of its pushers.
        updates: the shard, and the updates that it has had.
        comparison: with the other servers, where the aggregator needs whole gradients.
        robust: whether the aggregator is, so that too few gradients make no update.

    Attributes:
        stop: whether a pusher was asked to stop, which all answers then say.
    """

    def __init__(
        self, books: Books, updates: Updates, comparison: Comparison | None, *, robust: bool
    ) -> None:
        self.stop = False
        self._updates = updates
        self._comparison = comparison
        self._robust = robust
        self._held, self._readings, self._presence = books.held, books.readings, books.presence
        self._rounds = books.gate.rounds if isinstance(books.gate, RoundGate) else None

    def carry_out(self, decision: Decision) -> list[Reply]:
        """Drops, applies and answers what a decision names; gives the replies.

        Where servers compare gradients first, gives what tells them, and the rest follows with `carry_out_agreed`.
        """
        for pusher in decision.drop:
            self._held.take(pusher)
            self._updates.dropped += 1
        taken = [self._held.take(pusher) for pusher in decision.apply]
        if self._comparison is None:
            return self._apply_and_answer(taken, decision, None)
        return self._comparison.take(taken, decision, self._rounds) + self.carry_out_agreed()

    def carry_out_agreed(self) -> list[Reply]:
        """Carries out, in their order, the decisions that the other servers have said all about; gives the replies."""
        replies: list[Reply] = []
        while self._comparison is not None and (agreed := self._comparison.next()) is not None:
            replies += self._apply_and_answer(*agreed)
            if agreed.taken:
                replies += self.answer_final()
        return replies

    def apply(self, gradients: list[Pushed], distances: Tensor | None) -> None:
        """Makes one update of gradients, unless a robust aggregator finds them too few.

        Args:
            gradients: in the order in which they are summed.
            distances: between those that weigh something, where the aggregator needs them.
        """
        if self._updates.make(gradients, distances):
            self._readings.count(gradients)
        elif self._robust:  # they were too few
            for entry in gradients:
                first = entry.message.step
                self._held.left_out.add(entry.pusher, first, first + (entry.message.weight > 0))

    def apply_alone(self, entry: Pushed) -> None:
        """Does what `apply` does with one gradient, at less cost; most pushes of asynchronous runs end here."""
        if self._updates.make_of_one(entry):
            self._readings.versions[entry.pusher] += 1
        else:
            self.apply([entry], None)

    def answer(self, source: int) -> Reply:
        """Gives the answer to a rank, with the parameters as they are now."""
        updates, number = self._updates, self._presence.numbers[source]
        assert updates.shard is not None, "nobody is answered before there are parameters"
        shown, version = updates.shard.shown(), updates.version
        self._readings.note(number, version, shown)
        step = self._held.steps[number]
        return source, message_of((_PARAMETERS, shown, version, step, 1.0, 0.0, self.stop, 0))

    def answer_final(self) -> list[Reply]:
        """Gives the answer with the final parameters, if it was asked for and nobody can change them any more."""
        final = self._presence.ready_to_end
        waits = self._comparison is not None and self._comparison.busy
        return [] if final is None or self._updates.shard is None or waits else [self.answer(final)]

    def _apply_and_answer(
        self, taken: list[Pushed], decision: Decision, distances: Tensor | None
    ) -> list[Reply]:
        self._held.count(taken)
        for pusher in decision.answer + decision.acknowledge:
            self._held.settle(pusher, decision.step)
        if taken:
            self.apply(taken, distances)
        pushers = self._presence.pushers
        answers = [self.answer(pushers[pusher]) for pusher in decision.answer]
        answers += [self._acknowledgement(pusher) for pusher in decision.acknowledge]
        return answers

    def _acknowledgement(self, pusher: int) -> Reply:
        """Gives an answer without parameters: the pusher's copy, with its own updates, is new enough."""
        version, step = self._readings.versions[pusher], self._held.steps[pusher]
        message = Message(Kind.PARAMETERS, version=version, step=step, stop=self.stop)
        return self._presence.pushers[pusher], message
