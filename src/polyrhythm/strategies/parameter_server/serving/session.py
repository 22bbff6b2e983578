"""The session of a server: its membership, pushes, answers, and the end of the run.

    pusher ── PUSH(gradient, version, step) ─▶ held ─▶ gate ─▶ rule: apply (merge, aggregate, optimizer step),
                                                               version + 1
           ◀─ PARAMETERS(values or nothing, version, step) ──▶ answer, or acknowledge

Messages are input and replies are output; there is no network here. A message that no pusher sends in this
state is refused before anything is changed. A push with a step that has been applied already (a resumed
worker repeats itself) is answered and not applied again; where pushers are in lockstep, it counts as an empty
batch.

`ServerSession` alone owns the state of the pushers and the count of updates. Two objects decide, without
knowledge of ranks and repeated steps: the `Gate` decides when, the `Rule` decides how.

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
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, message_of
from polyrhythm.strategies.parameter_server.serving.admission import FiniteScreen, admit_bare, payload
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate, apply_one
from polyrhythm.strategies.parameter_server.serving.membership import Entrance, PusherRegistry
from polyrhythm.strategies.parameter_server.serving.parts import PushParts
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
        self._registry = PusherRegistry(pushers, spares, spared_by)
        self._numbers = self._registry.numbers
        self._held = HeldGradients(len(pushers))
        self._readings = LastReads(len(pushers), remembers=rule.remembers)
        self._screen = FiniteScreen(len(pushers), eject_after)
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
        return self._registry.done

    @property
    def steps(self) -> dict[int, int]:
        """Number of each pusher's gradients that need not be pushed again: applied, held permanently, or dropped."""
        return dict(zip(self._registry.pushers, self._held.steps, strict=True))

    @property
    def left_out(self) -> dict[int, list[list[int]]]:
        """Stretches of each rank's steps without an applied gradient, `[first, one past the last]`."""
        pushers = self._registry.pushers
        return {pushers[number]: found for number, found in self._held.left_out.by_pusher.items()}

    def stats(self) -> ServerStats:
        """Return its counters."""
        return ServerStats(
            self.staleness.copy(),
            self.version,
            self.steps,
            self._screen.total,
            self._registry.ejected,
            self.dropped,
            self.left_out,
        )

    def latest_staleness(self) -> dict[int, int]:
        latest, self._latest_staleness = self._latest_staleness, Counter()
        return dict(latest)

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Handle a message from a rank; return the replies; raise `RefusedMessage` if no rank sends it now."""
        if source not in self._numbers:
            return self._handle_peer(source, message)
        # By its place: the fields of a named tuple are looked up in its class each time.
        pusher, kind = self._numbers[source], message[0]
        if kind is self._contributes:
            if self._parts is not None:
                message = self._parts.join(source, message)
            replies = self._push(pusher, source, message)
        elif kind is Kind.PULL:
            replies = self._pull(pusher, source, message)
        elif kind is Kind.LEAVE:
            replies = self._leave(pusher, source, message)
        elif kind is Kind.JOIN:
            replies = self._enter_round(pusher, source, message)
        else:
            replies = self._begin(pusher, source, message)
        return replies if self._plain else self._completed(replies)

    def on_loss(self, rank: int) -> list[Reply]:
        """Forget a lost pusher until a replacement pulls; raise `RunError` if more are lost than can be spared."""
        if rank not in self._numbers:
            return []
        self._registry.miss(rank)
        if self._parts is not None:
            self._parts.forget(rank)
        if not self._registry.lose(rank):
            return []
        replies = self._continue_without(rank)
        return replies if self._plain else self._completed(replies)

    def answer_again(self, source: int) -> list[Reply]:
        """Repeat the answer to a pusher after the loss of a server: with the parameters as they are now."""
        registry = self._registry
        dismissed = registry.was_dismissed(source)
        if dismissed or not (registry.is_there(source) or source == registry.final):
            return [(source, Message(Kind.LEAVE, stop=dismissed))]
        return self._invitation(source) or [self._answer(self._numbers[source], source)]

    # A pusher that represents several workers may pause until another of them sends for it.

    @property
    def final(self) -> int | None:
        """The rank that has asked for the final parameters, if one has."""
        return self._registry.final

    def is_there(self, rank: int) -> bool:
        """Return whether a pusher has not left."""
        return self._registry.is_there(rank)

    def steps_of(self, rank: int) -> int:
        """Return how many gradients of a pusher need not be pushed again."""
        return self._held.steps[self._numbers[rank]]

    def forget_final(self) -> None:
        """Forget the request for the final parameters: a replacement will repeat it."""
        self._registry.final = None

    def silence(self, rank: int) -> list[Reply]:
        """Wait for a pusher no longer, which is not lost, until `readmit`."""
        number = self._numbers[rank]
        self._readings.forget(number)
        if rank in self._registry.asking:
            self._registry.asking.remove(rank)
        return self._carry_out(self._gate.leave(number))

    def readmit(self, rank: int) -> None:
        """Expect gradients again of a pusher that had paused."""
        self._gate.join(self._numbers[rank])

    def dismiss(self, rank: int, *, lost: bool) -> list[Reply]:
        """Continue without a pusher, which counts as `lost` if it had something left to push; see `on_loss`."""
        if lost:
            self._registry.miss(rank)
        self._registry.leave(rank)
        return self._continue_without(rank)

    def admit_late(self, rank: int) -> list[Reply]:
        """Answer a pusher that is through here, while another shard wants a step of it; in lockstep, in a round."""
        if self._rounds is None:
            return [self._answer(self._numbers[rank], rank)]
        self._gate.join(self._numbers[rank])
        return self._invitation(rank)

    def state(self) -> State:
        """Return all that a resumed server needs; raise `RefusedMessage` if there are no parameters yet."""
        if not self._registry.pushers:  # a site's server without workers
            return {}, {}
        tensors, facts = self._rule.state()
        held, held_facts = self._held.lasting_state(again=self._rule.forgets)
        counts, gate = super().state()[1], self._gate.state()[1]
        return tensors | held, {**counts, "gate": gate, **held_facts, **facts}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; worker 0's initial parameters are then not needed."""
        if not (facts := state[1]):
            return
        super().load_state(state)
        self._rule.load_state(state)
        self._held.load_state(state)
        self._gate.load_state(({}, facts.get("gate", {})))  # not all that are older have one
        self._gate.know(self._held.steps)

    def exact_state(self) -> State:
        """Return the whole state, so that another server can continue like this one, bit for bit."""
        tensors, facts = self._rule.exact_state()
        held, held_facts = self._held.exact_state()
        read, read_facts = self._readings.exact_state()
        counted = {name: exact_facts(part) for name, part in self._counting().items()}
        return tensors | held | read, {
            **facts,
            **super().state()[1],
            "stop": self.stop,
            "pushers": counted | {"held": held_facts, "readings": read_facts},
        }

    def load_exact_state(self, state: State) -> None:
        """Restore what `exact_state` returned, in place of all that there was."""
        tensors, facts = state
        super().load_state(state)
        self.stop = facts["stop"]
        self._rule.load_exact_state(state)
        pushers = facts["pushers"]
        self._held.load_state((tensors, pushers["held"]))
        self._readings.load_exact_state(tensors, pushers["readings"])
        for name, part in self._counting().items():
            take_exact_facts(part, pushers[name])

    def _counting(self) -> dict[str, object]:
        parts = {"gate": self._gate, "registry": self._registry, "screen": self._screen}
        return parts if self._rounds is None else parts | {"rounds": self._rounds}

    def _begin(self, pusher: int, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.PART and self._contributes is _PUSH:
            return self._take_part(source, message)
        if message.kind is Kind.FETCH and self._gate.fetches:
            return self._fetch(pusher, message)
        if message.kind is Kind.CONFIGURE:
            self._rule.configure(message)
            return []
        if message.kind is _PARAMETERS:
            if pusher != 0:
                raise RefusedMessage(Reason.SENDER, f"rank {source} sent the parameters to begin with")
            self._rule.begin(payload(message))
            return self._ask_for_all()
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {source}"
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
        asking = self._registry.take_asking()
        return [reply for other in asking for reply in self._ask(self._numbers[other])]

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
            self._registry.done |= news.done
        replies = self._ask_for_all() if rule.ready else []
        if rule.final and not was_final:
            replies += self._answer_final()
        return self._completed(replies)

    def _with_peers(self, replies: list[Reply]) -> list[Reply]:
        """Return the rule's messages to other servers, the replies, and answers to pushers that the gate unblocks."""
        rule, registry = self._rule, self._registry
        while (freed := self._gate.applied()) is not None:
            replies += self._carry_out(freed)
        rule.attend(Presence(registry.present, registry.lost, registry.final is not None, registry.done))
        outgoing, rule.outgoing = rule.outgoing, []
        return outgoing + replies

    def _pull(self, pusher: int, source: int, message: Message) -> list[Reply]:
        admit_bare(message)
        registry = self._registry
        if self._parts is not None:
            self._parts.forget(source)
        if message.stop:
            if pusher != 0:  # the first pusher decides for the run
                raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
            registry.final = source
            return self._answer_final()
        if not registry.is_there(source):  # a replacement
            if not (self._rule.admits(pusher) and registry.enter(source)):
                return [(source, Message(Kind.LEAVE))]
            if self._rule.forgets:
                self._held.discard(pusher)
            self._screen.forget(pusher)
            self._rule.enter(pusher)
            self._gate.join(pusher)
        if invitation := self._invitation(source):
            return invitation
        if self._rounds is not None:
            self._rounds.check_inside(pusher)
        if not self._rule.ready:
            registry.asking.append(source)
            return []
        return self._ask(pusher)

    def _invitation(self, source: int) -> list[Reply]:
        number = None if self._rounds is None else self._rounds.invitation(self._numbers[source])
        return [] if number is None else [(source, Entrance(number).message())]

    def _enter_round(self, pusher: int, source: int, message: Message) -> list[Reply]:
        if self._rounds is None:
            raise RefusedMessage(Reason.KIND, f"rank {source} named a round, and there are none")
        return self._carry_out(self._gate.enter(pusher, Entrance.of(message).round))

    def _ask(self, pusher: int) -> list[Reply]:
        return self._carry_out(self._gate.ask(pusher, self._held.steps[pusher]))

    def _push(self, pusher: int, source: int, message: Message) -> list[Reply]:
        rule, held = self._rule, self._held
        if self._turns or not rule.ready or self._registry.ejected:
            self._check_may_push(pusher, source)
        due = held.steps[pusher]
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
            if weight > 0 and not self._screen.passes(pusher, gradient):
                gradient, weight = torch.zeros_like(gradient), 0.0
            if self._screen.is_spent(pusher):
                return self._eject(source)
        if weight == 0 and rule.leaves_out:
            held.left_out.add(pusher, due, due + 1)
        decision = None if self._applies_all else self._gate.arrive(pusher, step)
        seen = self._readings.values[pusher]
        fresh = step + 1 - due
        entry = contribution_of((pusher, gradient, read_version, step, weight, rate, fresh, seen))
        # The same object, since to compare two takes longer; what is equal is only held and taken.
        waits = decision is not None and decision is not apply_one(pusher)
        if waits or rule.defers or held.entries.get(pusher):
            held.hold(entry)
            return self._carry_out(decision or apply_one(pusher))
        held.steps[pusher] = max(due, step + 1)  # as if it had been held and taken
        applied = rule.apply((entry,), self.version)
        assert type(applied) is Applied, "nothing is deferred"
        self._count(applied)
        given = applied[3]
        return [self._answer(pusher, source) if given is None else self._give(pusher, given[pusher])]

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

    def _check_may_push(self, pusher: int, source: int) -> None:
        """Refuse a push to a round by a pusher that has left, or not entered: its gradient would count twice."""
        if not self._rule.ready:
            raise RefusedMessage(Reason.ORDER, "a gradient arrived before the parameters")
        if self._registry.was_dismissed(source):
            raise RefusedMessage(Reason.SENDER, "a gradient arrived from a worker that had been evicted")
        if not self._turns:
            return
        if not self._registry.is_there(source):
            raise RefusedMessage(Reason.ORDER, f"a gradient arrived from rank {source}, which had left")
        if self._rounds is not None:
            self._rounds.check_inside(pusher)
        self._gate.check_turn(pusher)

    def _eject(self, rank: int) -> list[Reply]:
        """Let a pusher go, which then counts as lost; a replacement takes the step of this last gradient again."""
        self._registry.dismiss(rank)
        return [*self.on_loss(rank), (rank, Message(Kind.LEAVE, stop=True))]

    def _leave(self, pusher: int, source: int, message: Message) -> list[Reply]:
        rule = self._rule
        if message.tensor is None or not rule.parts:
            admit_bare(message)
            return self._continue_without(source) if self._registry.leave(source) else []
        if self._registry.is_there(source):
            self._check_may_push(pusher, source)
            rule.admit(message, rule.values, self.version, self._held.steps[pusher])
        if not self._registry.leave(source):
            return []
        step = message.step + rule.last
        fresh = step + 1 - self._held.steps[pusher]
        self._held.hold(Contribution(pusher, message.tensor, message.version, step, 1.0, 0.0, fresh))
        return self._carry_out(self._gate.part(pusher)) + self._answer_final()

    def _continue_without(self, rank: int) -> list[Reply]:
        number = self._numbers[rank]
        if self._rule.forgets:
            self._held.discard(number)
        for place, (batch, decision) in enumerate(self._deferred):  # its replacement has asked none of this
            answer = tuple(other for other in decision.answer if other != number)
            self._deferred[place] = batch, decision._replace(answer=answer)
        self._readings.forget(number)
        return self._carry_out(self._gate.leave(number)) + self._answer_final()

    def _carry_out(self, decision: Decision) -> list[Reply]:
        """Drop, apply and answer as decided; return the replies, and the messages to other servers."""
        held, rule = self._held, self._rule
        if not rule.ready:  # nothing has been pushed yet
            pushers = self._registry.pushers
            self._registry.asking += [pushers[pusher] for pusher in decision.answer]
            decision = Decision(at_once=True)  # other servers may still need notice of completed rounds
        for pusher in decision.drop:
            held.take(pusher)
            self.dropped += 1
        for pusher in decision.forget:
            held.discard(pusher)
        batch = [held.take(pusher) for pusher in decision.apply]
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
        held, pushers, step = self._held, self._registry.pushers, decision.step
        held.count(batch)
        for pusher in decision.answer:
            held.settle(pusher, step)
        for pusher in decision.acknowledge:
            held.settle(pusher, step)
        if batch and applied is not None:
            self._count(applied)
        given = applied.answers if applied is not None and applied.answers else {}
        replies = [
            self._give(pusher, given[pusher]) if pusher in given else self._answer(pusher, pushers[pusher])
            for pusher in decision.answer
        ]
        if decision.acknowledge:
            replies += [self._acknowledgement(pusher) for pusher in decision.acknowledge]
        return replies

    def _count(self, applied: Applied) -> None:
        batch, updates, staleness, _ = applied
        if updates:
            self.version += updates
            total, latest, versions = self.staleness, self._latest_staleness, self._readings.versions
            for age, gradients in staleness.items():  # `update` would look at all that there ever were
                total[age] = total.get(age, 0) + gradients
                latest[age] = latest.get(age, 0) + gradients
            for entry in batch:
                if entry[4] > 0:  # its weight
                    versions[entry[0]] += 1
        elif self._rule.chooses:  # they were too few
            for entry in batch:
                self._held.left_out.add(entry.pusher, entry.step, entry.step + (entry.weight > 0))

    def _answer(self, pusher: int, source: int) -> Reply:
        version = self.version
        shown = self._rule.answer(pusher, version)
        readings = self._readings
        readings.versions[pusher] = version
        if readings.remembers:
            readings.values[pusher] = shown
        return source, message_of(
            (_PARAMETERS, shown, version, self._held.steps[pusher], 1.0, 0.0, self.stop, 0)
        )

    def _give(self, pusher: int, given: Given) -> Reply:
        kind, tensor, step = given
        message = Message(kind, tensor, version=self.version, step=step, stop=self.stop)
        return self._registry.pushers[pusher], message

    def _acknowledgement(self, pusher: int) -> Reply:
        """Return an answer without parameters: the pusher's copy, with its own updates, is new enough."""
        version, step = self._readings.versions[pusher], self._held.steps[pusher]
        message = Message(_PARAMETERS, version=version, step=step, stop=self.stop)
        return self._registry.pushers[pusher], message

    def _answer_final(self) -> list[Reply]:
        """Answer with the final parameters, if they were requested and no pusher can change them any more."""
        final = self._registry.ready_to_end
        if final is None or not (self._rule.ready and self._rule.final) or self._deferred:
            return []
        return [self._answer(self._numbers[final], final)]


class HeldGradients(Stateful):
    """The gradients that one server holds. Pushers are numbered from 0.

    Attributes:
        steps: number of each pusher's gradients that need not be pushed again: applied, held for good, or
            over.
        left_out: steps among these that were not applied.
        entries: held gradients of each pusher, oldest first.
    """

    fields = (StateField("left_out", dict[int, list[list[int]]], at="left_out.by_pusher", absent={}),)

    def __init__(self, pushers: int) -> None:
        self.steps = [0] * pushers
        self.left_out = SkippedSteps()
        self.entries: dict[int, list[Contribution]] = {}

    def hold(self, entry: Contribution) -> None:
        """Hold a gradient, which may still have to be repeated."""
        self.entries.setdefault(entry.pusher, []).append(entry)

    def take(self, pusher: int) -> Contribution:
        """Return the oldest gradient that is held of a pusher, and hold it no more."""
        return self.entries[pusher].pop(0)

    def discard(self, pusher: int) -> None:
        """Hold nothing of a pusher any more."""
        self.entries.pop(pusher, None)

    def of(self, pusher: int) -> Sequence[Contribution]:
        """Return all that is held of a pusher."""
        return self.entries.get(pusher, ())

    def count(self, entries: Iterable[Contribution]) -> None:
        """Count steps that must not be repeated."""
        for entry in entries:
            self.steps[entry.pusher] = max(self.steps[entry.pusher], entry.step + 1)

    def settle(self, pusher: int, step: int | None) -> None:
        """Mark this pusher's held steps, and all before `step`, as final, since it is answered."""
        self.count(self.of(pusher))
        self.left_out.add(pusher, self.steps[pusher], step or 0)
        self.steps[pusher] = max(self.steps[pusher], step or 0)

    def lasting_state(self, *, again: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the gradients that will not be repeated, and the counts; `again`: all held ones are repeated."""
        everything = [] if again else self._everything()
        return self._packed([entry for entry in everything if entry.step < self.steps[entry.pusher]])

    def _everything(self) -> list[Contribution]:
        return [entry for pusher in sorted(self.entries) for entry in self.entries[pusher]]

    def _packed(self, kept: Sequence[Contribution]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"held.{number}": entry.gradient for number, entry in enumerate(kept)}
        tensors |= {
            f"seen.{number}": entry.seen for number, entry in enumerate(kept) if entry.seen is not None
        }
        held = [[entry.pusher, *entry[2:7]] for entry in kept]  # version, step, weight, learning rate, fresh
        return tensors, {"steps": list(self.steps), "held": held, **super().state()[1]}

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all, also the gradients that a resumed pusher would push again."""
        return self._packed(self._everything())

    def load_state(self, state: State) -> None:
        """Restore what `state` or `exact_state` returned.

        Raises:
            ValueError: the number of pushers differs.
        """
        tensors, facts = state
        if len(facts["steps"]) != len(self.steps):
            raise ValueError(f"it has {len(self.steps)} pushers, and the state {len(facts['steps'])}")
        self.steps = list(facts["steps"])
        super().load_state(state)
        for number, (pusher, read_version, step, weight, rate, *fresh) in enumerate(facts.get("held", ())):
            gradient, seen = tensors[f"held.{number}"], tensors.get(f"seen.{number}")
            count = fresh[0] if fresh else 1  # earlier versions held single gradients
            self.hold(Contribution(pusher, gradient, read_version, step, weight, rate, count, seen))


Stretch = list[int]
"""A first step, and the one after the last."""


class SkippedSteps:
    """The steps without an applied gradient on one server.

    Attributes:
        by_pusher: stretches of left-out steps of each pusher with any, by number, in order and apart.
    """

    def __init__(self) -> None:
        self.by_pusher: dict[int, list[Stretch]] = {}

    def add(self, pusher: int, start: int, stop: int) -> None:
        """Add the steps `[start, stop)` of a pusher, which follow all that were added before."""
        if start >= stop:
            return
        stretches = self.by_pusher.setdefault(pusher, [])
        if stretches and stretches[-1][1] == start:
            stretches[-1][1] = stop
        else:
            stretches.append([start, stop])


class LastReads:
    """The version that each pusher of one server has read last. Pushers are numbered from 0.

    Args:
        remembers: whether what was read is kept, and not its version alone.

    Attributes:
        versions: versions that pushers have read, and since then one more for each gradient of their own that
            was applied.
        values: parameters that each pusher has read, each `(n,)`, where they are kept; never changed.
        remembers: the given flag.
    """

    def __init__(self, pushers: int, *, remembers: bool) -> None:
        self.versions = [0] * pushers
        self.values: list[Tensor | None] = [None] * pushers
        self.remembers = remembers

    def count(self, applied: Sequence[Contribution]) -> None:
        """Count an update that was made of these gradients."""
        for entry in applied:
            self.versions[entry.pusher] += entry.weight > 0

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that has been read; a checkpoint does without, since resumed pushers read again."""
        read = {f"read.{pusher}": values for pusher, values in enumerate(self.values) if values is not None}
        return read, {"versions": list(self.versions)}

    def load_exact_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `exact_state` returned."""
        self.versions = list(facts["versions"])
        self.values = [tensors.get(f"read.{pusher}") for pusher in range(len(self.versions))]

    def forget(self, pusher: int) -> None:
        """Forget a failed pusher."""
        self.versions[pusher] = 0
        self.values[pusher] = None


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
