"""The server's end of push and pull: one shard of the parameters, its optimiser, and a gate.

    pusher ── PUSH(gradient, version, step) ─▶ held ─▶ gate ─▶ apply: merge, aggregate, optimiser step, version + 1
           ◀─ PARAMETERS(values or nothing, version, step) ──▶ answer, or acknowledge

A message comes in and replies go out; there is no network here. A message that no pusher sends in this state is refused
before anything is changed. A push whose step has been applied already (a resumed worker repeats itself) is answered
and not applied again; where pushers go in step, it counts as an empty batch.

This file checks messages and asks the gate. What follows from its decision is in `decision_executor.py`, the parameters
and their updates in `updates.py`, who joins and leaves in `entrance.py`, how the run ends in `presence.py`, gradients
that all servers must compare first in `comparison.py`.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, admit_push, payload
from polyrhythm.strategies.parameter_server.serving.books import Books
from polyrhythm.strategies.parameter_server.serving.comparison import Comparison
from polyrhythm.strategies.parameter_server.serving.decision_executor import DecisionExecutor
from polyrhythm.strategies.parameter_server.serving.entrance import Entrance
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, RoundGate, let_through
from polyrhythm.strategies.parameter_server.serving.shard import Handling, pushed_of
from polyrhythm.strategies.parameter_server.serving.updates import Updates
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
