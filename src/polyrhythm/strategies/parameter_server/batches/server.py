"""The server of Sandblaster: gathers a batch's gradient from all workers, and makes its shard's part of an L-BFGS step.

all workers ── PUSH(mean of portions) ─▶ the batch's gradient ─▶ scalar products ── VECTOR ─▶ all other servers
            ◀─ PARAMETERS ── a step along the line, or along the next ◀── their sum ──
"""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.batches.curvature import Curvature, Search
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, admit_push, payload
from polyrhythm.strategies.parameter_server.serving.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.optimized_shard import OptimizedShard
from polyrhythm.strategies.parameter_server.serving.parts import Parts
from polyrhythm.strategies.parameter_server.serving.presence import Presence
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.strategies.state import State

Reply = tuple[int, Message]


class BatchServer:
    """One server; see `ServerPart`.

    Args:
        setting: which of all servers it is, and whose gradients come.
        search: how steps are made of gradients.

    Attributes:
        version: batches so far that have changed the parameters.
        staleness: how many gradients were applied at which staleness.
    """

    def __init__(self, setting: ServerSetting, search: Search) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self._shard = OptimizedShard()
        self._curvature = Curvature(self._shard, search)
        self._presence = Presence(setting.cast.workers)
        self._parts = Parts(setting.cast.servers, setting.index)
        self._steps = [0] * len(setting.cast.workers)
        self._held: dict[int, Message] = {}
        self._undecided: list[Message] = []
        self._stop = False

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""
        return self._presence.done

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each worker are in batches that are over."""
        return dict(zip(self._presence.pushers, self._steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RefusedMessage: a message that no worker or server of ours sends now.
        """
        if self._parts.knows(source) and message.kind is Kind.VECTOR:
            self._parts.hear(source, message)
            return self._decide()
        number = self._presence.number(source, message.kind)
        if message.kind is Kind.PUSH:
            return self._push(number, message)
        if message.kind is Kind.PULL:
            admit_bare(message)
            return self._pull(source, final=message.stop)
        if message.kind is Kind.LEAVE:
            admit_bare(message)
            return self.on_loss(source)
        if message.kind is Kind.CONFIGURE:
            self._shard.configure(message)
            return []
        if message.kind is Kind.PARAMETERS:
            self._shard.initialise(payload(message))
            asking, self._presence.asking = self._presence.asking, []
            return [self._answer(rank) for rank in asking]
        raise RefusedMessage(
            Reason.KIND, f"a server cannot do anything with {message.kind.name} from rank {source}"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """Waits for a worker no longer; what it has pushed still counts."""
        if rank not in self._presence.numbers or not self._presence.leave(rank):
            return []
        return self._gather() + self._answer_final()

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""
        tensors, facts = self._shard.state()
        curvature, curvature_facts = self._curvature.state()
        return tensors | curvature, {
            "version": self.version,
            "steps": list(self._steps),
            "staleness": {str(key): count for key, count in self.staleness.items()},
            "curvature": curvature_facts,
            **facts,
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        tensors, facts = state
        self.version = facts["version"]
        self._steps = list(facts["steps"])
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._curvature.load_state((tensors, facts["curvature"]))
        self._shard.load_state(state)

    def _pull(self, source: int, *, final: bool) -> list[Reply]:
        if final:
            if source != self._presence.pushers[0]:
                raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
            self._presence.final = source
            return self._answer_final()
        if not self._presence.enter(source):
            return [(source, Message(Kind.LEAVE))]
        if self._shard.ready:
            return [self._answer(source)]
        self._presence.asking.append(source)
        return []

    def _push(self, worker: int, message: Message) -> list[Reply]:
        if not self._shard.ready:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        if worker in self._held:
            raise RefusedMessage(Reason.ORDER, "a gradient came although its batch is not over")
        admit_push(message, self._shard.values, self.version, message.step)  # a batch may end at any step
        self._stop |= message.stop
        if message.step < self._steps[worker]:
            return [self._answer(self._presence.pushers[worker])]
        self._held[worker] = message
        return self._gather()

    def _gather(self) -> list[Reply]:
        """Makes the batch's gradient once all who are there have pushed, and begins to multiply."""
        there = [number for rank, number in self._presence.numbers.items() if self._presence.is_there(rank)]
        if self._undecided or not self._held or not self._held.keys() >= set(there):
            return []
        pushed = [self._held[number] for number in sorted(self._held)]
        weights = [message.weight for message in pushed]
        if not sum(weights) > 0:
            return self._answer_all()
        self._undecided = pushed
        products = self._curvature.products(mean([payload(message) for message in pushed], weights))
        return self._parts.offer(products) + self._decide()

    def _decide(self) -> list[Reply]:
        """Steps, once all servers' products are there."""
        gram = self._parts.whole() if self._undecided else None
        if gram is None:
            return []
        pushed, self._undecided = self._undecided, []
        self._curvature.advance(gram, max(message.learning_rate for message in pushed))
        for number, message in self._held.items():
            if message.weight > 0:
                self.staleness[self.version - message.version] += message.step + 1 - self._steps[number]
        self.version += 1
        return self._answer_all()

    def _answer_all(self) -> list[Reply]:
        held, self._held = self._held, {}
        for number, message in held.items():
            self._steps[number] = message.step + 1
        return [self._answer(self._presence.pushers[number]) for number in sorted(held)]

    def _answer_final(self) -> list[Reply]:
        final = self._presence.ready_to_end
        return [] if final is None or not self._shard.ready else [self._answer(final)]

    def _answer(self, source: int) -> Reply:
        step = self._steps[self._presence.numbers[source]]
        values = self._shard.shown()
        return source, Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=self._stop)
