"""The session of a server: its membership, pushes, answers, and the end of the run.

    pusher ── PUSH(gradient, version, step) ─▶ held ─▶ gate ─▶ rule: apply (merge, aggregate, optimizer step),
                                                               version + 1
           ◀─ PARAMETERS(values or nothing, version, step) ──▶ answer, or acknowledge

Messages are input and replies are output; there is no network here. A message that no pusher sends in this
state is refused before anything is changed. A push with a step that has been applied already (a resumed
worker repeats itself) is answered and not applied again; where pushers are in lockstep, it counts as an empty
batch.

`ServerSession` alone owns the state of the pushers (`Pushers`, a row for each) and the count of updates. Two objects
decide, without knowledge of ranks and repeated steps: the `Gate` decides when, the `Rule` decides how.

    PULL ─▶ late: LEAVE ─▶ in lockstep: JOIN, at which round? ─▶ wait for the parameters, or ask the gate
    PUSH ─▶ admit ─▶ repeated? ─▶ finite? ─▶ gate.arrive ─▶ Decision
    Decision ─▶ drop ─▶ apply: rule.apply ─▶ Applied ─▶ answer, or acknowledge
                            └─ Deferred: message to other servers ─▶ rule.on_peer ─▶ rule.resume ─▶ Applied

A rule that converses with other servers puts its messages to them in `Rule.outgoing`; they leave before the
replies:

    any message ─▶ as above ─▶ gate.applied: unblocked pushers ─▶ rule.attend: membership ─▶ messages, replies
    other server ─▶ rule.on_peer ─▶ News ──┘

Decisions are carried out in their order: what follows a deferred one waits behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, message_of
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, payload
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate, apply_one
from polyrhythm.strategies.parameter_server.serving.parts import PushParts
from polyrhythm.strategies.parameter_server.serving.pushers import Pusher, Pushers
from polyrhythm.strategies.parameter_server.serving.rounds import Entrance
from polyrhythm.strategies.parameter_server.serving.rule import (
    Applied,
    Contribution,
    Deferred,
    Given,
    Presence,
    Reply,
    Rule,
    contribution_of,
)
from polyrhythm.strategies.server_part import CountsLatestStaleness, ServerStats
from polyrhythm.strategies.state import State, StateField, Stateful

_PARAMETERS, _PUSH = Kind.PARAMETERS, Kind.PUSH  # an enum is slow to ask for its members


class ServerSession(CountsLatestStaleness, Stateful):
    """One server; see `ServerPart`.

    A *pusher* is a rank that pushes gradients: a worker, or what stands for a group of workers.

    Args:
        pushers: ranks that push gradients, in the order in which the gate numbers them.
        spares: number of pushers that may be lost at once; 0: the run decides.
        spared_by: limiting rule, for an error's text.
        eject_after: gradients of a pusher in a row that are not finite, after which it is evicted; 0: never.

    Attributes:
        version: updates applied so far.
        staleness: number of applied gradients by staleness.
        dropped: number of late gradients that were dropped.
        stop: whether a pusher was asked to stop; all answers then carry the request.
    """

    fields = (
        StateField("version", int, at="version"),
        StateField("staleness", dict[int, int], at="staleness"),
        StateField("dropped", int, at="dropped", absent=0),
    )

    def __init__(
        self,
        pushers: tuple[int, ...],
        rule: Rule,
        spares: int = 0,
        spared_by: str = "",
        eject_after: int = 0,
    ) -> None:
        self.version = 0
        self.staleness: dict[int, int] = {}
        self.dropped = 0
        self.stop = False
        self._latest_staleness: Counter[int] = Counter()
        self._rule = rule
        self._contributes = rule.contributes
        self._converses = rule.converses
        self._gate = rule.gate
        self._rounds = rule.gate.rounds
        self._turns = rule.gate.takes_turns or rule.gate.rounds is not None
        # Class attributes are slower to look up through an instance.
        self._admit, self._last, self._screens = rule.admit, rule.last, rule.screens
        self._applies_all = type(rule.gate).arrive is Gate.arrive
        self._pushers = Pushers(pushers, spares, spared_by)
        self._rows = self._pushers.rows
        self._of_rank = self._pushers.of_rank
        self._remembers = rule.remembers
        self._eject_after = eject_after
        self._deferred: deque[tuple[Sequence[Contribution] | None, Decision]] = deque()
        """Decisions in their order; the first one waits for other servers; those without a batch wait for it."""
        self._proposed = 0
        """Number of batches that other servers were notified of."""
        self._parts: PushParts | None = None  # set by the first part of a push
        self._plain = not self._converses
        """Whether replies leave as they are made."""

    @property
    def values(self) -> Tensor:
        """`(n,)`, the shard's parameters; empty until worker 0 has sent them."""
        return self._rule.values

    @property
    def done(self) -> bool:
        """Whether all pushers have left, and the one that asked for the final parameters has let the servers go."""
        return self._pushers.done

    @property
    def answers_pushes(self) -> bool:
        """Whether a push is answered; else parameters are fetched."""
        return not self._gate.fetches

    @property
    def steps(self) -> dict[int, int]:
        """Number of each pusher's gradients that need not be pushed again: applied, held permanently, or dropped."""
        return {row.rank: row.steps for row in self._rows}

    @property
    def left_out(self) -> dict[int, list[list[int]]]:
        """Stretches of each rank's steps without an applied gradient, `[first, one past the last]`."""
        return {row.rank: row.left_out for row in self._rows if row.left_out}

    def stats(self) -> ServerStats:
        """Return its counters."""
        return ServerStats(
            self.staleness.copy(),
            self.version,
            self.steps,
            self._pushers.not_finite,
            self._pushers.ejected,
            self.dropped,
            self.left_out,
        )

    def latest_staleness(self) -> dict[int, int]:
        latest, self._latest_staleness = self._latest_staleness, Counter()
        return dict(latest)

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Handle a message from a rank; return the replies; raise `RefusedMessage` if no rank sends it now."""
        row = self._of_rank.get(source)
        if row is None:
            return self._handle_peer(source, message)
        kind = message[0]  # by its place: the fields of a named tuple are looked up in its class each time
        if kind is self._contributes:
            if self._parts is not None:
                message = self._parts.join(source, message)
            replies = self._push(row, message)
        elif kind is Kind.PULL:
            replies = self._pull(row, message)
        elif kind is Kind.LEAVE:
            replies = self._leave(row, message)
        elif kind is Kind.JOIN:
            replies = self._enter_round(row, message)
        else:
            replies = self._begin(row, message)
        return replies if self._plain else self._completed(replies)

    def on_loss(self, rank: int) -> list[Reply]:
        """Forget a lost pusher until a replacement pulls; raise `RunError` if more are lost than can be spared."""
        row = self._of_rank.get(rank)
        if row is None:
            return []
        self._pushers.miss(row)
        if self._parts is not None:
            self._parts.forget(rank)
        if not self._pushers.lose(row):
            return []
        replies = self._continue_without(row)
        return replies if self._plain else self._completed(replies)

    def answer_again(self, source: int) -> list[Reply]:
        """Repeat the answer to a pusher after the loss of a server: with the parameters as they are now."""
        row = self._of_rank[source]
        if row.dismissed or (row.left and row is not self._pushers.final):
            return [(source, Message(Kind.DISMISSED if row.dismissed else Kind.LEAVE))]
        return self._invitation(row) or [self._answer(row)]

    # A pusher that represents several workers may pause until another of them sends for it.

    @property
    def final(self) -> int | None:
        """The rank that has asked for the final parameters, if one has."""
        final = self._pushers.final
        return None if final is None else final.rank

    def is_there(self, rank: int) -> bool:
        """Return whether a pusher has not left."""
        return not self._of_rank[rank].left

    def steps_of(self, rank: int) -> int:
        """Return how many gradients of a pusher need not be pushed again."""
        return self._of_rank[rank].steps

    def forget_final(self) -> None:
        """Forget the request for the final parameters: a replacement will repeat it."""
        self._pushers.final = None

    def silence(self, rank: int) -> list[Reply]:
        """Wait for a pusher no longer, which is not lost, until `readmit`."""
        row = self._of_rank[rank]
        row.forget_reads()
        self._pushers.stop_asking(row)
        return self._carry_out(self._gate.leave(row.number))

    def readmit(self, rank: int) -> None:
        """Expect gradients again of a pusher that had paused."""
        self._gate.join(self._of_rank[rank].number)

    def dismiss(self, rank: int, *, lost: bool) -> list[Reply]:
        """Continue without a pusher, which counts as `lost` if it had something left to push; see `on_loss`."""
        row = self._of_rank[rank]
        if lost:
            self._pushers.miss(row)
        self._pushers.leave(row)
        return self._continue_without(row)

    def admit_late(self, rank: int) -> list[Reply]:
        """Answer a pusher that is through here, while another shard wants a step of it; in lockstep, in a round."""
        row = self._of_rank[rank]
        if self._rounds is None:
            return [self._answer(row)]
        self._gate.join(row.number)
        return self._invitation(row)

    def state(self) -> State:
        """Return all that a resumed server needs; raise `RefusedMessage` if there are no parameters yet."""
        if not self._rows:  # a site's server without workers
            return {}, {}
        tensors, facts = self._rule.state()
        held, counted = self._pushers.state(again=self._rule.forgets)
        own, gate = super().state()[1], self._gate.state()[1]
        return tensors | held, {**own, "gate": gate, **counted, **facts}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; worker 0's initial parameters are then not needed."""
        if not (facts := state[1]):
            return
        super().load_state(state)
        self._rule.load_state(state)
        self._pushers.load_state(state)
        self._gate.load_state(({}, facts.get("gate", {})))  # not all that are older have one
        self._gate.know([row.steps for row in self._rows])

    def exact_state(self) -> State:
        """Return the whole state, so that another server can continue like this one, bit for bit."""
        tensors, facts = self._rule.exact_state()
        of_pushers, pushers = self._pushers.exact_state()
        return tensors | of_pushers, {
            **facts,
            **super().state()[1],
            "stop": self.stop,
            "pushers": pushers,
            "gate": exact_facts(self._gate),
            "rounds": None if self._rounds is None else exact_facts(self._rounds),
        }

    def load_exact_state(self, state: State) -> None:
        """Restore what `exact_state` returned, in place of all that there was."""
        tensors, facts = state
        super().load_state(state)
        self.stop = facts["stop"]
        self._rule.load_exact_state(state)
        self._pushers.load_exact_state((tensors, facts["pushers"]))
        take_exact_facts(self._gate, facts["gate"])
        if self._rounds is not None:
            take_exact_facts(self._rounds, facts["rounds"])

    def _begin(self, row: Pusher, message: Message) -> list[Reply]:
        if message.kind is Kind.PART and self._contributes is _PUSH:
            return self._take_part(row.rank, message)
        if message.kind is Kind.FETCH and self._gate.fetches:
            return self._fetch(row.number, message)
        if message.kind is Kind.CONFIGURE:
            self._rule.configure(message)
            return []
        if message.kind is _PARAMETERS:
            if row.number != 0:
                raise RefusedMessage(Reason.SENDER, f"rank {row.rank} sent the parameters to begin with")
            self._rule.begin(payload(message))
            return self._ask_for_all()
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {row.rank}"
        )

    def _take_part(self, source: int, message: Message) -> list[Reply]:
        """Keep a part of a push, without any other effect: turns are checked for the whole push."""
        if not self._rule.ready:
            raise RefusedMessage(Reason.ORDER, "a gradient arrived before the parameters")
        if self._parts is None:
            self._parts, self._plain = PushParts(), False
        self._parts.take(source, message, self._rule.values)
        return []

    def _completed(self, replies: list[Reply]) -> list[Reply]:
        """Return messages to other servers, then replies; those to pushes in parts are cut as these were."""
        if self._converses:
            replies = self._with_peers(replies)
        return replies if self._parts is None else self._parts.cut(replies)

    def _ask_for_all(self) -> list[Reply]:
        return [reply for row in self._pushers.take_asking() for reply in self._ask(row)]

    def _handle_peer(self, source: int, message: Message) -> list[Reply]:
        rule = self._rule
        was_final = rule.final
        news = rule.on_peer(source, message)
        if not self._converses:
            replies = self._resume_deferred()
            return replies if self._plain else self._completed(replies)
        if news is not None:
            self.version += news.updates
            self.stop |= news.stop
            self._pushers.done |= news.done
        replies = self._ask_for_all() if rule.ready else []
        if rule.final and not was_final:
            replies += self._answer_final()
        return self._completed(replies)

    def _with_peers(self, replies: list[Reply]) -> list[Reply]:
        """Return the rule's messages to other servers, the replies, and answers to pushers that the gate unblocks."""
        rule, pushers = self._rule, self._pushers
        while (freed := self._gate.applied()) is not None:
            replies += self._carry_out(freed)
        rule.attend(Presence(pushers.present, bool(pushers.lost), pushers.final is not None, pushers.done))
        outgoing, rule.outgoing = rule.outgoing, []
        return outgoing + replies

    def _pull(self, row: Pusher, message: Message) -> list[Reply]:
        admit_bare(message)
        pusher, pushers = row.number, self._pushers
        if self._parts is not None:
            self._parts.forget(row.rank)
        if message.stop:
            if pusher != 0:  # the first pusher decides for the run
                raise RefusedMessage(Reason.SENDER, f"rank {row.rank} asked for the final parameters")
            pushers.final = row
            return self._answer_final()
        if row.left:  # a replacement
            if not (self._rule.admits(pusher) and pushers.enter(row)):
                return [(row.rank, Message(Kind.LEAVE))]
            if self._rule.forgets:
                row.held = []
            row.not_finite = 0
            self._rule.enter(pusher)
            self._gate.join(pusher)
        if invitation := self._invitation(row):
            return invitation
        if self._rounds is not None:
            self._rounds.check_inside(pusher)
        if not self._rule.ready:
            pushers.asking.append(row)
            return []
        return self._ask(row)

    def _invitation(self, row: Pusher) -> list[Reply]:
        number = None if self._rounds is None else self._rounds.invitation(row.number)
        return [] if number is None else [(row.rank, Entrance(number).message())]

    def _enter_round(self, row: Pusher, message: Message) -> list[Reply]:
        if self._rounds is None:
            raise RefusedMessage(Reason.KIND, f"rank {row.rank} named a round, and there are none")
        return self._carry_out(self._gate.enter(row.number, Entrance.of(message).round))

    def _ask(self, row: Pusher) -> list[Reply]:
        return self._carry_out(self._gate.ask(row.number, row.steps))

    def _push(self, row: Pusher, message: Message) -> list[Reply]:
        rule, pusher, due = self._rule, row.number, row.steps
        if self._turns or not rule.ready or self._pushers.ejected:
            self._check_may_push(row)
        admit = self._admit
        admit(message, rule.values, self.version, due)
        _, gradient, read_version, step, weight, rate, stop, _ = message
        assert gradient is not None, "it has been admitted"
        if stop:
            self._note_stop()
        step += self._last
        # Repeated by a pusher without the answer: it is not applied again, but has to be answered.
        if step < due and rule.repeats:
            repeated = self._gate.repeat(pusher, step, due)
            if repeated is not None:
                return self._carry_out(repeated)
            weight = 0.0
        if self._screens:
            if weight > 0 and not self._pushers.passes(row, gradient):
                gradient, weight = torch.zeros_like(gradient), 0.0
            if 0 < self._eject_after <= row.not_finite:
                return self._eject(row)
        if weight == 0 and rule.leaves_out:
            row.leave_out(due, due + 1)
        decision = None if self._applies_all else self._gate.arrive(pusher, step)
        fresh = step + 1 - due
        entry = contribution_of((pusher, gradient, read_version, step, weight, rate, fresh, row.seen))
        # The same object, since to compare two takes longer; what is equal is only held and taken.
        waits = decision is not None and decision is not apply_one(pusher)
        if waits or rule.defers or row.held:
            row.held.append(entry)
            return self._carry_out(decision or apply_one(pusher))
        row.steps = max(due, step + 1)  # as if it had been held and taken
        applied = rule.apply((entry,), self.version)
        assert type(applied) is Applied, "nothing is deferred"
        self._count(applied)
        given = applied[3]
        return [self._answer(row) if given is None else self._give(row, given[pusher])]

    def _fetch(self, pusher: int, message: Message) -> list[Reply]:
        admit_bare(message)
        if not self._rule.ready:
            raise RefusedMessage(Reason.ORDER, "parameters were fetched before there were any")
        if message.stop:
            self._note_stop()
        return self._carry_out(self._gate.fetch(pusher))

    def _note_stop(self) -> None:
        self.stop = True
        self._gate.stop()

    def _check_may_push(self, row: Pusher) -> None:
        """Refuse a push to a round by a pusher that has left, or not entered: its gradient would count twice."""
        if not self._rule.ready:
            raise RefusedMessage(Reason.ORDER, "a gradient arrived before the parameters")
        if row.dismissed:
            raise RefusedMessage(Reason.SENDER, "a gradient arrived from a worker that had been evicted")
        if not self._turns:
            return
        if row.left:
            raise RefusedMessage(Reason.ORDER, f"a gradient arrived from rank {row.rank}, which had left")
        if self._rounds is not None:
            self._rounds.check_inside(row.number)
        self._gate.check_turn(row.number)

    def _eject(self, row: Pusher) -> list[Reply]:
        """Let a pusher go, which then counts as lost; a replacement takes the step of this last gradient again."""
        self._pushers.dismiss(row)
        return [*self.on_loss(row.rank), (row.rank, Message(Kind.DISMISSED))]

    def _leave(self, row: Pusher, message: Message) -> list[Reply]:
        rule, pusher = self._rule, row.number
        if message.tensor is None or not rule.parts:
            admit_bare(message)
            return self._continue_without(row) if self._pushers.leave(row) else []
        if not row.left:
            self._check_may_push(row)
            rule.admit(message, rule.values, self.version, row.steps)
        if not self._pushers.leave(row):
            return []
        step = message.step + rule.last
        fresh = step + 1 - row.steps
        row.held.append(Contribution(pusher, message.tensor, message.version, step, 1.0, 0.0, fresh))
        return self._carry_out(self._gate.part(pusher)) + self._answer_final()

    def _continue_without(self, row: Pusher) -> list[Reply]:
        number = row.number
        if self._rule.forgets:
            row.held = []
        for place, (batch, decision) in enumerate(self._deferred):  # its replacement has asked none of this
            answer = tuple(other for other in decision.answer if other != number)
            self._deferred[place] = batch, decision._replace(answer=answer)
        row.forget_reads()
        return self._carry_out(self._gate.leave(number)) + self._answer_final()

    def _carry_out(self, decision: Decision) -> list[Reply]:
        """Drop, apply and answer as decided; return the replies, and the messages to other servers."""
        rows, rule = self._rows, self._rule
        if not rule.ready:  # nothing has been pushed yet
            self._pushers.asking += [rows[pusher] for pusher in decision.answer]
            decision = Decision(at_once=True)  # other servers may still need notice of completed rounds
        for pusher in decision.drop:
            rows[pusher].held.pop(0)
            self.dropped += 1
        for pusher in decision.forget:
            rows[pusher].held = []
        batch = [rows[pusher].held.pop(0) for pusher in decision.apply]
        if rule.defers:
            return self._defer(batch, decision) + self._resume_deferred()
        if not batch:
            return self._settle(decision, ())
        applied = rule.apply(batch, self.version)
        assert isinstance(applied, Applied), "nothing is deferred"
        return self._settle(decision, batch, applied)

    def _defer(self, batch: list[Contribution], decision: Decision) -> list[Reply]:
        """Let a decision wait until all servers have reported their gradients of its round."""
        rounds = self._rounds
        # Pushes of lost pushers only are repeated.
        counts = bool(batch) and (rounds is None or not set(decision.apply).isdisjoint(decision.answer))
        outgoing: list[Reply] = []
        if rounds is not None:  # rounds that were not taken here are over
            for _ in range(rounds.number - counts - self._proposed):
                outgoing += self._propose([], Decision())
        if counts:
            return outgoing + self._propose(batch, decision)
        if decision.at_once:
            return outgoing + self._settle(decision, ())
        self._deferred.append((None, decision))
        return outgoing

    def _propose(self, batch: list[Contribution], decision: Decision) -> list[Reply]:
        self._proposed += 1
        self._deferred.append((batch, decision))
        deferred = self._rule.apply(batch, self.version)
        assert isinstance(deferred, Deferred), "the rule defers"
        return list(deferred.notify)

    def _resume_deferred(self) -> list[Reply]:
        """Execute, in their order, the decisions with all messages of other servers."""
        replies: list[Reply] = []
        while self._deferred:
            batch, decision = self._deferred[0]
            if batch is None:
                self._deferred.popleft()
                replies += self._settle(decision, ())
                continue
            result = self._rule.resume(batch, self.version)
            if result is None:
                break
            if isinstance(result, Deferred):
                replies += result.notify
                continue
            self._deferred.popleft()
            replies += self._settle(decision, result.batch, result)
            if not batch:
                continue
            follows = self._gate.applied()
            if follows is not None:
                replies += self._carry_out(follows)
            replies += self._answer_final()
        return replies

    def _settle(
        self, decision: Decision, batch: Sequence[Contribution], applied: Applied | None = None
    ) -> list[Reply]:
        rows, step = self._rows, decision.step
        for entry in batch:
            rows[entry.pusher].count(entry.step)
        for pusher in (*decision.answer, *decision.acknowledge):
            rows[pusher].settle(step)
        if batch and applied is not None:
            self._count(applied)
        given = applied.answers if applied is not None and applied.answers else {}
        replies = [
            self._give(rows[pusher], given[pusher]) if pusher in given else self._answer(rows[pusher])
            for pusher in decision.answer
        ]
        return replies + [self._acknowledgement(rows[pusher]) for pusher in decision.acknowledge]

    def _count(self, applied: Applied) -> None:
        batch, updates, staleness, _ = applied
        if updates:
            self.version += updates
            total, latest, rows = self.staleness, self._latest_staleness, self._rows
            for age, gradients in staleness.items():  # `update` would look at all that there ever were
                total[age] = total.get(age, 0) + gradients
                latest[age] = latest.get(age, 0) + gradients
            for entry in batch:
                if entry[4] > 0:  # its weight
                    rows[entry[0]].read_version += 1
        elif self._rule.chooses:  # they were too few
            for entry in batch:
                self._rows[entry.pusher].leave_out(entry.step, entry.step + (entry.weight > 0))

    def _answer(self, row: Pusher) -> Reply:
        version = self.version
        shown = self._rule.answer(row.number, version)
        row.read_version = version
        if self._remembers:
            row.seen = shown
        return row.rank, message_of((_PARAMETERS, shown, version, row.steps, 1.0, 0.0, self.stop, 0))

    def _give(self, row: Pusher, given: Given) -> Reply:
        kind, tensor, step = given
        return row.rank, Message(kind, tensor, version=self.version, step=step, stop=self.stop)

    def _acknowledgement(self, row: Pusher) -> Reply:
        """Return an answer without parameters: the pusher's copy, with its own updates, is new enough."""
        return row.rank, Message(_PARAMETERS, version=row.read_version, step=row.steps, stop=self.stop)

    def _answer_final(self) -> list[Reply]:
        """Answer with the final parameters, if they were requested and no pusher can change them any more."""
        final = self._pushers.ready_to_end
        if final is None or not (self._rule.ready and self._rule.final) or self._deferred:
            return []
        return [self._answer(final)]


def exact_facts(owner: object) -> dict[str, Any]:
    """Return all attributes of an object that are numbers, None, or lists and sets of numbers; others never change."""
    return {
        name: sorted(value) if isinstance(value, set) else _copied(value)
        for name, value in vars(owner).items()
        if value is None or isinstance(value, int | float | list | set)
    }


def take_exact_facts(owner: object, facts: dict[str, Any]) -> None:
    """Restore what `exact_facts` returned of an equal object."""
    for name, value in facts.items():
        setattr(owner, name, set(value) if isinstance(getattr(owner, name), set) else _copied(value))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
