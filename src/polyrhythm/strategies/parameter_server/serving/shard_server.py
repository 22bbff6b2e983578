"""The server's end of push and pull: one shard of the parameters, its optimiser, and a gate.

    pusher ── PUSH(gradient, version, step) ─▶ held ─▶ gate ─▶ apply: merge, aggregate, optimiser step, version + 1
           ◀─ PARAMETERS(values or nothing, version, step) ──▶ answer, or acknowledge

A message comes in and replies go out; there is no network here. What nobody of ours would send is refused before
anything is changed. A push whose step has been applied already (a
resumed worker repeats itself) is answered and not applied again.

The end of several servers is one end: the leader asks all for the final parameters, and lets them go (a second LEAVE)
once it has all. From the first of its two on, a successor is told to leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.serving.admission import (
    admit_bare,
    admit_push,
    admitted_initial,
    admitted_plan,
    payload,
)
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, Decision
from polyrhythm.strategies.parameter_server.serving.krum_scores import squared_distances
from polyrhythm.strategies.parameter_server.serving.not_finite import NotFinite
from polyrhythm.strategies.parameter_server.serving.parts import Parts
from polyrhythm.strategies.parameter_server.serving.shard import Handling, Pushed, Shard
from polyrhythm.strategies.state import State
from polyrhythm.training.optimizer_plan import OptimizerPlan

Reply = tuple[int, Message]


@dataclass
class _Reading:
    """What a pusher has read last.

    Attributes:
        version: that it was, and since then one more for each gradient of its own that was applied.
        values: `(n,)`, where the merge rule remembers them.
    """

    version: int = 0
    values: Tensor | None = None


class ShardServer:
    """One server; see `ServerPart`.

    Args:
        pushers: ranks that push gradients, in the order in which gates number them.
        consistency: makes the gate.
        handling: of gradients; default: their mean as they come.
        servers: ranks of all servers, where they must agree on something.
        index: of this one among them.

    Attributes:
        version: updates applied so far.
        staleness: how many gradients were applied at which staleness.
        dropped: gradients that came too late.
        ejected: pushers that were let go, once each time.
    """

    def __init__(
        self,
        pushers: tuple[int, ...],
        consistency: Consistency,
        handling: Handling | None = None,
        servers: tuple[int, ...] = (),
        index: int = 0,
    ) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.dropped = 0
        self.ejected = 0
        self._pushers = pushers
        self._numbers = {rank: number for number, rank in enumerate(pushers)}
        self._consistency = consistency
        self._handling = handling or Handling()
        self._gate = consistency.gate(len(pushers))
        self._not_finite = NotFinite(len(pushers), self._handling.eject_after)
        self._screens = not (consistency.in_step() or self._handling.aggregator.robust)
        self._ejected: set[int] = set()
        self._plan: OptimizerPlan | None = None
        self._shard: Shard | None = None
        self._resumed: State | None = None
        self._held: dict[int, list[Pushed]] = {}
        self._readings = [_Reading() for _ in pushers]
        self._parts = Parts(servers, index)
        self._undecided: tuple[list[Pushed], Decision] | None = None
        self._asking: list[int] = []
        self._final: int | None = None
        self._finished = False
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._steps = [0] * len(pushers)
        self._stop = False
        self._copy: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """`(n,)`, the shard's parameters; empty until worker 0 has sent them."""
        return self._shard.values if self._shard is not None else torch.empty(0)

    @property
    def not_finite(self) -> int:
        """How many gradients were left out since they were not finite."""
        return self._not_finite.total

    @property
    def done(self) -> bool:
        """Whether all pushers have left, and the one that asked for the final parameters has let the servers go."""
        return self._finished

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each pusher need not be pushed again: applied, held for good, or over."""
        return dict(zip(self._pushers, self._steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RefusedMessage: a message that no pusher of ours sends now.
        """
        if source not in self._numbers:
            return self._hear_server(source, message)
        if message.kind is Kind.PUSH:
            return self._push(self._numbers[source], message)
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.LEAVE:
            admit_bare(message)
            return self._leave(self._numbers[source])
        if message.kind is Kind.CONFIGURE:
            self._configure(message)
            return []
        if message.kind is Kind.PARAMETERS:
            return self._initialise(payload(message))
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {source}"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """Forgets a pusher that is gone, until a successor pulls; the steps that it pushed still count.

        Raises:
            RunError: more are lost than the consistency can spare.
        """
        if rank not in self._numbers:
            return []
        if rank in self._asking:
            self._asking.remove(rank)
        if self._numbers[rank] not in self._left:
            self._lost.add(rank)
        self._check_losses()
        return self._leave(self._numbers[rank])

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""
        if self._shard is None:
            raise RefusedMessage(Reason.ORDER, "a server was asked for its state before it had parameters")
        tensors, facts = self._shard.state()
        everything = [entry for entries in self._held.values() for entry in entries]
        kept = [entry for entry in everything if entry.message.step < self._steps[entry.pusher]]
        tensors |= {f"held.{number}": payload(entry.message) for number, entry in enumerate(kept)}
        held = [[entry.pusher, *entry.message[2:6]] for entry in kept]  # version, step, weight, learning rate
        staleness = {str(key): count for key, count in self.staleness.items()}
        return tensors, {
            "version": self.version,
            "steps": list(self._steps),
            "staleness": staleness,
            "dropped": self.dropped,
            "held": held,
            "gate": self._gate.state(),
            **facts,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        tensors, facts = state
        self.version = facts["version"]
        self._steps = list(facts["steps"])
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self.dropped = facts["dropped"]
        for number, (pusher, *numbers) in enumerate(facts["held"]):
            self._hold(Pushed(pusher, Message(Kind.PUSH, tensors[f"held.{number}"], *numbers)))
        self._gate.load_state(facts["gate"])
        self._resumed = state

    def _configure(self, message: Message) -> None:
        if self._shard is not None:
            raise RefusedMessage(Reason.ORDER, "an optimiser's plan came although training has begun")
        self._plan = admitted_plan(message)

    def _initialise(self, values: Tensor) -> list[Reply]:
        plan = admitted_initial(self._plan, values, ready=self._shard is not None)
        if self._resumed is not None:
            values = self._resumed[0]["values"]
        self._shard = Shard(plan, values, self._handling)
        if self._resumed is not None:
            self._shard.load_state(self._resumed)
            self._resumed = None
        asking, self._asking = self._asking, []
        return [reply for source in asking for reply in self._ask(self._numbers[source])]

    def _pull(self, source: int, message: Message) -> list[Reply]:
        admit_bare(message)
        if message.stop:  # the final parameters: only when nobody can change them any more
            if source != self._pushers[0]:
                raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
            self._final = source
            return self._answer_final()
        pusher = self._numbers[source]
        if pusher in self._left:  # a successor
            if self._final is not None:  # who comes so late might change one shard and not another
                return [(source, Message(Kind.LEAVE))]
            self._left.remove(pusher)
            self._lost.discard(source)
            self._ejected.discard(pusher)
            self._not_finite.forget(pusher)
            self._gate.join(pusher)
        if self._shard is None:
            self._asking.append(source)
            return []
        return self._ask(pusher)

    def _ask(self, pusher: int) -> list[Reply]:
        return self._carry_out(self._gate.ask(pusher, self._steps[pusher]))

    def _push(self, pusher: int, message: Message) -> list[Reply]:
        if self._shard is None:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        if pusher in self._ejected:
            raise RefusedMessage(Reason.SENDER, "a gradient came from a worker that had been let go")
        admit_push(message, self._shard.values, self.version, self._steps[pusher])
        self._stop |= message.stop
        if message.step < self._steps[pusher]:
            return self._ask(pusher)
        if self._screens:
            message = self._not_finite.screened(pusher, message)
            if self._not_finite.is_spent(pusher):
                return self._eject(pusher)
        self._hold(Pushed(pusher, message, self._readings[pusher].values))
        return self._carry_out(self._gate.arrive(pusher, message.step))

    def _leave(self, pusher: int) -> list[Reply]:
        if pusher in self._left:
            self._finished |= self._final == self._pushers[pusher]
            return []
        self._left.add(pusher)
        self._readings[pusher] = _Reading()
        return self._carry_out(self._gate.leave(pusher)) + self._answer_final()

    def _eject(self, pusher: int) -> list[Reply]:
        """Lets a pusher go, which then counts as lost; a successor takes the step of this last gradient again."""
        self.ejected += 1
        self._ejected.add(pusher)
        rank = self._pushers[pusher]
        return [*self.on_loss(rank), (rank, Message(Kind.LEAVE, stop=True))]

    def _carry_out(self, decision: Decision) -> list[Reply]:
        for pusher in decision.drop:
            self._take(pusher)
            self.dropped += 1
        taken = [self._take(pusher) for pusher in decision.apply]
        for pusher in decision.answer + decision.acknowledge:  # what is held of them will not come again
            self._count(self._held.get(pusher, ()))
            self._steps[pusher] = max(self._steps[pusher], decision.step or 0)
        self._count(taken)
        if self._handling.aggregator.whole and taken:
            self._undecided = taken, decision
            return self._parts.offer(_distances(taken)) + self._decide()
        return self._apply_and_answer(taken, decision, None)

    def _decide(self) -> list[Reply]:
        """Makes the update that waits for the other servers, if they have said all."""
        distances = self._parts.whole() if self._undecided is not None else None
        if self._undecided is None or distances is None:
            return []
        (taken, decision), self._undecided = self._undecided, None
        return self._apply_and_answer(taken, decision, distances)

    def _apply_and_answer(
        self, taken: list[Pushed], decision: Decision, distances: Tensor | None
    ) -> list[Reply]:
        if taken:
            self._apply(taken, distances)
        answers = [self._answer(self._pushers[pusher]) for pusher in decision.answer]
        answers += [self._acknowledgement(pusher) for pusher in decision.acknowledge]
        return answers

    def _apply(self, gradients: list[Pushed], distances: Tensor | None) -> None:
        assert self._shard is not None, "nobody pushes before having pulled"
        applied = self._shard.update(gradients, self.version, distances)
        if applied:
            if self._shard.trains:
                self._copy = None
            for age, gradients_of_it in applied.items():  # `+=` would look at all that there ever were
                self.staleness[age] += gradients_of_it
            self.version += 1
            for entry in gradients:
                self._readings[entry.pusher].version += entry.message.weight > 0

    def _hold(self, entry: Pushed) -> None:
        self._held.setdefault(entry.pusher, []).append(entry)

    def _take(self, pusher: int) -> Pushed:
        """Gives the oldest gradient that is held of a pusher, and holds it no more."""
        return self._held[pusher].pop(0)

    def _count(self, entries: Sequence[Pushed]) -> None:
        """Counts steps that must not come again."""
        for entry in entries:
            self._steps[entry.pusher] = max(self._steps[entry.pusher], entry.message.step + 1)

    def _answer_final(self) -> list[Reply]:
        if self._final is None or len(self._left) < len(self._pushers) or self._shard is None:
            return []
        return [self._answer(self._final)]

    def _answer(self, source: int) -> Reply:
        number = self._numbers[source]
        shown = self._shown()
        self._readings[number] = _Reading(self.version, shown if self._handling.merge.remembers else None)
        step = self._steps[number]
        return source, Message(Kind.PARAMETERS, shown, version=self.version, step=step, stop=self._stop)

    def _acknowledgement(self, pusher: int) -> Reply:
        """Gives an answer without parameters: the pusher's copy, with its own updates, is new enough."""
        version, step = self._readings[pusher].version, self._steps[pusher]
        return self._pushers[pusher], Message(Kind.PARAMETERS, version=version, step=step, stop=self._stop)

    def _shown(self) -> Tensor:
        """Gives a copy of the values, one for all who are answered with this version: it leaves while updates go on."""
        if self._copy is None:
            self._copy = self.values.clone()
        return self._copy

    def _hear_server(self, source: int, message: Message) -> list[Reply]:
        heeded = self._handling.aggregator.whole and self._parts.knows(source)
        if message.kind is not Kind.VECTOR or not heeded:
            raise RefusedMessage(
                Reason.SENDER,
                f"a server heard {message.kind.name} from rank {source}, which pushes nothing here",
            )
        self._parts.hear(source, message)
        return self._decide()

    def _check_losses(self) -> None:
        spare = self._consistency.spares(len(self._pushers))
        if 0 < spare < len(self._lost):
            ranks = ", ".join(map(str, sorted(self._lost)))
            raise RunError(
                f"{len(self._lost)} workers are lost (ranks {ranks}), and {self._consistency} can spare {spare}: "
                "continue with --resume, or start anew with more spare ones"
            )


def _distances(taken: list[Pushed]) -> Tensor:
    return squared_distances([payload(entry.message) for entry in taken if entry.message.weight > 0])
