"""The server's end of push and pull: one shard of the parameters, its optimiser, and a gate.

    pusher ── PUSH(gradient, version, step) ─▶ held ─▶ gate ─▶ apply: merge, aggregate, optimiser step,
                                                               version + 1
           ◀─ PARAMETERS(values or nothing, version, step) ──▶ answer, or acknowledge

A message comes in and replies go out; there is no network here. A message that no pusher sends in this state
is refused before anything is changed. A push whose step has been applied already (a resumed worker repeats
itself) is answered and not applied again; where pushers are in lockstep, it counts as an empty batch.

`ShardServer` checks messages and asks the gate. `Entrance` admits pushers and lets them leave:

    PULL ─▶ late: LEAVE ─▶ in lockstep: JOIN, at which round? ─▶ wait for the parameters, or ask the gate

`DecisionExecutor` carries out what the gate decides:

    decision ─▶ drop ─▶ apply: merge, aggregate, optimiser step, version + 1 ─▶ answer, or acknowledge
                           └─ where whole gradients are compared: only once all servers have agreed

The state of the pushers is in `pusher_state.py`, parameters and updates are in `shard.py`, who is there and
how the run ends in `membership.py`, gradients that all servers must compare first in `distance_exchange.py`.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, message_of
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, admit_push, payload
from polyrhythm.strategies.parameter_server.serving.distance_exchange import Comparison
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision, RoundGate, let_through
from polyrhythm.strategies.parameter_server.serving.pusher_state import Books
from polyrhythm.strategies.parameter_server.serving.shard import Handling, Pushed, Updates, pushed_of
from polyrhythm.strategies.state import State

Reply = tuple[int, Message]
_PUSH = Kind.PUSH  # an enum is slow to ask for its members


class ShardServer:
    """One server; see `ServerPart`.

    A *pusher* is a rank that pushes gradients: a worker, or what stands for a group of workers.

    Args:
        pushers: ranks that push gradients, in the order in which gates number them.
        consistency: makes the gate.
        handling: of gradients; default: their mean as they come.
        servers: ranks of all servers, where they must agree on something.
        index: of this one among them.
    """

    def __init__(
        self,
        pushers: tuple[int, ...],
        consistency: Consistency,
        handling: Handling | None = None,
        servers: tuple[int, ...] = (),
        index: int = 0,
    ) -> None:
        self._handling = handling or Handling()
        self._updates = Updates(self._handling)
        books = self._books = Books(pushers, consistency, self._handling)
        self._gate, self._held, self._readings = books.gate, books.held, books.readings
        self._presence, self._losses, self._not_finite = books.presence, books.losses, books.not_finite
        self._numbers = self._presence.numbers
        self._entrance = Entrance(books)
        self._leaves_out = not (consistency.in_step() or self._handling.aggregator.robust)
        self._checks_finite = self._leaves_out and self._not_finite.looks
        self._rounds = self._gate.rounds if isinstance(self._gate, RoundGate) else None
        aggregator = self._handling.aggregator
        self._comparison = Comparison(servers, index, len(pushers)) if aggregator.whole else None
        self._executor = DecisionExecutor(books, self._updates, self._comparison, robust=aggregator.robust)

    @property
    def values(self) -> Tensor:
        """`(n,)`, the shard's parameters; empty until worker 0 has sent them."""
        shard = self._updates.shard
        return shard.values if shard is not None else torch.empty(0)

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._updates.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness."""
        return self._updates.staleness

    @property
    def dropped(self) -> int:
        """Gradients that came too late."""
        return self._updates.dropped

    @property
    def not_finite(self) -> int:
        """How many gradients were left out since they were not finite."""
        return self._not_finite.total

    @property
    def ejected(self) -> int:
        """How many pushers were let go, once each time."""
        return self._losses.ejected

    @property
    def done(self) -> bool:
        """Whether all pushers have left, and the one that asked for the final parameters has let the servers go."""
        return self._presence.done

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each pusher need not be pushed again: applied, held for good, or over."""
        return dict(zip(self._presence.pushers, self._held.steps, strict=True))

    def latest_staleness(self) -> dict[int, int]:
        """Gives how many gradients were applied at which staleness since the last call."""
        return self._updates.latest_staleness()

    @property
    def left_out(self) -> dict[int, list[list[int]]]:
        """For each rank, the stretches of its steps, `[first, one past the last]`, of which no gradient was applied."""
        pushers = self._presence.pushers
        return {pushers[number]: found for number, found in self._held.left_out.by_pusher.items()}

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RefusedMessage: a message that no pusher of ours sends now.
        """
        if source not in self._numbers:
            return self._on_server_message(source, message)
        if message.kind is _PUSH:
            return self._push(source, message)
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.LEAVE:
            admit_bare(message)
            return self._leave(source)
        if message.kind is Kind.JOIN:
            return self._enter(source, message)
        return self._begin(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Forgets a pusher that is gone, until a successor pulls; the steps that it pushed still count.

        Raises:
            RunError: more are lost than the consistency can spare.
        """
        if rank not in self._numbers:
            return []
        return self._go_on_without(rank) if self._entrance.lose(rank) else []

    def answer_again(self, source: int) -> list[Reply]:
        """Answers a pusher whose last answer was lost with a server: with the parameters as they are now."""
        refused = self._entrance.shown_out(source) or self._entrance.invited(source)
        return refused or [self._executor.answer(source)]

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""
        tensors, facts = self._updates.state()
        held, held_facts = self._held.state()
        counts, gate = self._updates.counts(), self._gate.state()
        return tensors | held, {**counts, "gate": gate, **held_facts, **facts}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        tensors, facts = state
        self._updates.load_state(state)
        self._held.load_state(tensors, facts)
        self._gate.load_state(facts["gate"])

    def exact_state(self) -> State:
        """Gives all that another server needs to go on as this one would, in the middle of a run, bit for bit."""
        tensors, facts = self._updates.exact_state()
        books, book_facts = self._books.exact_state()
        return tensors | books, {
            **facts,
            "books": book_facts,
            **self._updates.counts(),
            "stop": self._executor.stop,
        }

    def load_exact_state(self, state: State) -> None:
        """Takes back what `exact_state` gave, in place of all that there was."""
        tensors, facts = state
        self._updates.load_exact_state(state)
        self._books.load_exact_state((tensors, facts["books"]))
        self._executor.stop = facts["stop"]

    def _begin(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.CONFIGURE:
            self._updates.configure(message)
            return []
        if message.kind is Kind.PARAMETERS:
            self._updates.begin(payload(message))
            waiting = self._entrance.all_waiting()
            return [reply for other in waiting for reply in self._ask(self._numbers[other])]
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {source}"
        )

    def _pull(self, source: int, message: Message) -> list[Reply]:
        admit_bare(message)
        if message.stop:
            self._entrance.ask_for_end(source)
            return self._executor.answer_final()
        if replies := self._entrance.let_in(source):
            return replies
        if self._rounds is not None:
            self._rounds.check_inside(self._numbers[source])
        if self._updates.shard is None:
            self._entrance.wait(source)
            return []
        return self._ask(self._numbers[source])

    def _enter(self, source: int, message: Message) -> list[Reply]:
        decision = self._entrance.come_in(source, message)
        if self._updates.shard is None:
            self._entrance.wait(source)
            return []
        return self._executor.carry_out(decision)

    def _ask(self, pusher: int) -> list[Reply]:
        return self._executor.carry_out(self._gate.ask(pusher, self._held.steps[pusher]))

    def _push(self, source: int, message: Message) -> list[Reply]:
        pusher, shard = self._numbers[source], self._updates.shard
        if shard is None:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        if self._losses.ejected and self._losses.was_let_go(source):
            raise RefusedMessage(Reason.SENDER, "a gradient came from a worker that had been let go")
        if self._rounds is not None:
            self._check_takes_part(source)
        due = self._held.steps[pusher]
        admit_push(message, shard.values, self._updates.version, due)
        self._executor.stop |= message.stop
        number = message.step
        if number < due:  # it is repeated
            if self._rounds is None or not self._rounds.is_next(pusher, number):
                return self._ask(pusher)
            message = message._replace(weight=0.0)
        if self._checks_finite:
            message = self._not_finite.screened(pusher, message)
            if self._not_finite.is_spent(pusher):
                return self._eject(source)
        if self._leaves_out and message.weight == 0:
            self._held.left_out.add(pusher, due, due + 1)
        decision = self._gate.arrive(pusher, number)
        entry = pushed_of((pusher, message, self._readings.values[pusher]))
        # The same object, since to compare two takes longer; what is equal is only held and taken.
        if decision is let_through(pusher) and self._comparison is None and not self._held.of(pusher):
            self._held.steps[pusher] = max(due, number + 1)  # as if it had been held and taken
            self._executor.apply_alone(entry)
            return [self._executor.answer(source)]
        self._held.hold(entry)
        return self._executor.carry_out(decision)

    def _check_takes_part(self, source: int) -> None:
        """Refuses a push to a round by a pusher that has left, or not come in: its gradient would count twice."""
        assert self._rounds is not None, "asked only where there are rounds"
        if not self._presence.is_there(source):
            raise RefusedMessage(Reason.ORDER, f"a gradient came from rank {source}, which had left")
        self._rounds.check_inside(self._numbers[source])

    def _leave(self, rank: int) -> list[Reply]:
        return self._go_on_without(rank) if self._presence.leave(rank) else []

    def _go_on_without(self, rank: int) -> list[Reply]:
        if self._comparison is not None:
            self._comparison.forget(self._numbers[rank])
        return self._executor.carry_out(self._entrance.leave(rank)) + self._executor.answer_final()

    def _eject(self, rank: int) -> list[Reply]:
        """Lets a pusher go, which then counts as lost; a successor takes the step of this last gradient again."""
        self._losses.let_go(rank)
        return [*self.on_loss(rank), (rank, Message(Kind.LEAVE, stop=True))]

    def _on_server_message(self, source: int, message: Message) -> list[Reply]:
        comparison = self._comparison
        if comparison is None or message.kind is not Kind.VECTOR or not comparison.knows(source):
            raise RefusedMessage(
                Reason.SENDER,
                f"a server heard {message.kind.name} from rank {source}, which pushes nothing here",
            )
        comparison.on_message(source, message)
        return self._executor.carry_out_agreed()


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
