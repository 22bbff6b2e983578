"""The server's end of push and pull: one shard of the parameters, its optimiser, and a gate.

    pusher ── PUSH(gradient, version, step) ─▶ held ─▶ gate ─▶ apply: optimiser step, version + 1
           ◀─ PARAMETERS(values, version, step) ────────────▶ answer

A message comes in and replies go out; there is no network here. A push whose step has been applied already (a
resumed worker repeats itself) is answered and not applied again.

The end of several servers is one end: the leader asks all for the final parameters, and lets them go (a second LEAVE)
once it has all. From the first of its two on, a successor is told to leave.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, unpack_json
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.strategy import State
from polyrhythm.training.optimizer_plan import FlatOptimizer, OptimizerPlan

Reply = tuple[int, Message]


class ShardServer:
    """One server; see `ServerPart`.

    Args:
        pushers: ranks that push gradients, in the order in which gates number them.
        consistency: makes the gate.

    Attributes:
        version: updates applied so far.
        staleness: how many gradients were applied at which staleness.
        values: `(n,)`, the shard's parameters; empty until worker 0 has sent them.
    """

    def __init__(self, pushers: tuple[int, ...], consistency: Consistency) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.values = torch.empty(0)
        self._pushers = pushers
        self._numbers = {rank: number for number, rank in enumerate(pushers)}
        self._gate = consistency.gate(len(pushers))
        self._plan: OptimizerPlan | None = None
        self._optimizer: FlatOptimizer | None = None
        self._resumed: State | None = None
        self._held: dict[int, Message] = {}
        self._asking: list[int] = []
        self._final: int | None = None
        self._finished = False
        self._left: set[int] = set()
        self._steps = [0] * len(pushers)
        self._stop = False
        self._copy: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all pushers have left, and the one that asked for the final parameters has let the servers go."""
        return self._finished

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each pusher have been applied or, weighing nothing, counted."""
        return dict(zip(self._pushers, self._steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RunError: a message that no pusher of ours sends.
        """
        if source not in self._numbers:
            raise RunError(
                f"a server heard {message.kind.name} from rank {source}, which pushes nothing here"
            )
        if message.kind is Kind.CONFIGURE:
            self._plan = OptimizerPlan.from_json(unpack_json(_tensor(message)))
            return []
        if message.kind is Kind.PARAMETERS:
            return self._initialise(_tensor(message))
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.PUSH:
            return self._push(self._numbers[source], message)
        if message.kind is Kind.LEAVE:
            return self._leave(self._numbers[source])
        raise RunError(f"a server cannot do anything with {message.kind.name} from rank {source}")

    def on_loss(self, rank: int) -> list[Reply]:
        """Forgets a pusher that is gone, until a successor pulls; the steps that it pushed still count."""
        if rank not in self._numbers:
            return []
        if rank in self._asking:
            self._asking.remove(rank)
        return self._leave(self._numbers[rank])

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""
        assert self._optimizer is not None, "a server is asked for its state only after it has parameters"
        tensors, facts = self._optimizer.state()
        named = {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
        staleness = {str(key): count for key, count in self.staleness.items()}
        return {"values": self.values, **named}, {
            "version": self.version,
            "steps": list(self._steps),
            "staleness": staleness,
            "gate": self._gate.state(),
            "optimizer": facts,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        facts = state[1]
        self.version = facts["version"]
        self._steps = list(facts["steps"])
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._gate.load_state(facts["gate"])
        self._resumed = state

    def _initialise(self, values: Tensor) -> list[Reply]:
        assert self._plan is not None, "worker 0 sends the plan before the parameters"
        self.values = values if self._resumed is None else self._resumed[0]["values"]
        self._optimizer = self._plan.build(self.values)
        if self._resumed is not None:
            prefix = "optimizer."
            tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in self._resumed[0].items()
                if name.startswith(prefix)
            }
            self._optimizer.load_state(tensors, self._resumed[1]["optimizer"])
            self._resumed = None
        asking, self._asking = self._asking, []
        return [self._answer(source) for source in asking]

    def _pull(self, source: int, message: Message) -> list[Reply]:
        if message.stop:  # the final parameters: only when nobody can change them any more
            self._final = source
            return self._answer_final()
        pusher = self._numbers[source]
        if pusher in self._left:  # a successor
            if self._final is not None:  # who comes so late might change one shard and not another
                return [(source, Message(Kind.LEAVE))]
            self._left.remove(pusher)
            self._gate.join(pusher)
        if self._optimizer is None:
            self._asking.append(source)
            return []
        return [self._answer(source)]

    def _push(self, pusher: int, message: Message) -> list[Reply]:
        self._stop |= message.stop
        if message.step < self._steps[pusher]:
            return [self._answer(self._pushers[pusher])]
        self._held[pusher] = message
        decision = self._gate.arrive(pusher, message.step)
        return self._carry_out(decision.apply, decision.answer)

    def _leave(self, pusher: int) -> list[Reply]:
        if pusher in self._left:
            self._finished |= self._final == self._pushers[pusher]
            return []
        self._left.add(pusher)
        decision = self._gate.leave(pusher)
        return self._carry_out(decision.apply, decision.answer) + self._answer_final()

    def _carry_out(self, apply: tuple[int, ...], answer: tuple[int, ...]) -> list[Reply]:
        if apply:
            self._apply([self._held.pop(pusher) for pusher in apply])
            for pusher in apply:
                self._steps[pusher] += 1
        return [self._answer(self._pushers[pusher]) for pusher in answer]

    def _apply(self, gradients: list[Message]) -> None:
        """Makes one update of one or more gradients, their mean weighted with their samples."""
        assert self._optimizer is not None, "nobody pushes before having pulled"
        if not any(message.weight > 0 for message in gradients):  # only empty batches
            return
        self._copy = None
        self._optimizer.step(_mean(gradients), gradients[0].learning_rate)
        for message in gradients:
            if message.weight > 0:
                self.staleness[self.version - message.version] += 1
        self.version += 1

    def _answer_final(self) -> list[Reply]:
        if self._final is None or len(self._left) < len(self._pushers) or self._optimizer is None:
            return []
        return [self._answer(self._final)]

    def _answer(self, source: int) -> Reply:
        step = self._steps[self._numbers[source]]
        return source, Message(
            Kind.PARAMETERS, self._shown(), version=self.version, step=step, stop=self._stop
        )

    def _shown(self) -> Tensor:
        """Gives a copy of the values, one for all who are answered with this version: it leaves while updates go on."""
        if self._copy is None:
            self._copy = self.values.clone()
        return self._copy


def _mean(gradients: list[Message]) -> Tensor:
    if len(gradients) == 1:
        return _tensor(gradients[0])
    total = torch.zeros_like(_tensor(gradients[0]))
    weight = total.new_zeros(())  # in the gradients' dtype, where an all-reduce adds the weights up as well
    for message in gradients:
        weight.add_(message.weight)
        if message.weight == 1.0:
            total.add_(_tensor(message))
        elif message.weight > 0:
            total.add_(_tensor(message) * message.weight)
    return total.div_(weight)


def _tensor(message: Message) -> Tensor:
    if message.tensor is None:
        raise RunError(f"a {message.kind.name} came without its tensor")
    return message.tensor
