"""The server of Sandblaster: gathers a batch's gradient from all workers, and makes its shard's part of an L-BFGS step.

all workers ── PUSH(mean of portions) ─▶ the batch's gradient ─▶ scalar products ── VECTOR ─▶ all other servers
            ◀─ PARAMETERS ── a step along the line, or along the next ◀── their sum ──

Where a worker is lost, a batch is of those who are left, and of what it had pushed, if all servers have that; else that
comes again. Its successor comes in at the same batch on all servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.batches.curvature import Curvature, Search
from polyrhythm.strategies.parameter_server.rules.aggregator import mean
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, admit_push, payload
from polyrhythm.strategies.parameter_server.serving.optimized_shard import OptimizedShard
from polyrhythm.strategies.parameter_server.serving.parts import Parts, summed
from polyrhythm.strategies.parameter_server.serving.presence import Presence
from polyrhythm.strategies.parameter_server.serving.rounds import Rounds
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
        self._rounds = Rounds(len(setting.cast.workers))
        self._held: dict[int, Message] = {}
        self._batch: dict[int, Message] = {}
        """What is multiplied, by worker, in their order."""
        self._owed: set[int] = set()
        """Workers who wait for that."""
        self._void = 0
        """Batches of which others may have something, and this server has nothing."""
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
            self._parts.on_message(source, message)
            return self._decide()
        number = self._presence.number(source, message.kind)
        if message.kind is Kind.PUSH:
            return self._push(number, message)
        if message.kind is Kind.PULL:
            admit_bare(message)
            return self._pull(source, final=message.stop)
        if message.kind is Kind.LEAVE:
            admit_bare(message)
            return self._go_on_without(number) if self._presence.leave(source) else []
        if message.kind is Kind.JOIN:
            admit_bare(message._replace(step=0))
            self._rounds.accept(number, message.step)
            return self._gather()
        return self._begin(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Waits for a worker no longer; what it has pushed still counts."""
        if rank not in self._presence.numbers or not self._presence.lose(rank):
            return []
        return self._go_on_without(self._presence.numbers[rank])

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

    def _begin(self, source: int, message: Message) -> list[Reply]:
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

    def _pull(self, source: int, *, final: bool) -> list[Reply]:
        if final:
            if source != self._presence.pushers[0]:
                raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
            self._presence.final = source
            return self._answer_final()
        number = self._presence.numbers[source]
        succeeds = not self._presence.is_there(source)
        if not self._presence.enter(source):
            return [(source, Message(Kind.LEAVE))]
        if succeeds:
            self._rounds.invite(number, later=number in self._held)
            return [(source, Message(Kind.JOIN, step=self._rounds.invitation(number) or 0))]
        return self._answer_if_begun([number])

    def _go_on_without(self, worker: int) -> list[Reply]:
        self._rounds.forget(worker)
        self._owed.discard(worker)
        return self._gather() + self._answer_final()

    def _push(self, worker: int, message: Message) -> list[Reply]:
        if not self._shard.ready:
            raise RefusedMessage(Reason.ORDER, "a gradient came before the parameters")
        if worker in self._held or worker in self._owed:
            raise RefusedMessage(Reason.ORDER, "a gradient came although its batch is not over")
        admit_push(message, self._shard.values, self.version, message.step)  # a batch may end at any step
        self._stop |= message.stop
        if message.step < self._steps[worker]:
            return self._answer_if_begun([worker])
        self._held[worker] = message
        return self._gather()

    def _gather(self) -> list[Reply]:
        """Begins to multiply once all who are there have pushed; lets in who comes at the next batch."""
        if self._batch or self._rounds.held_up:
            return []
        replies = self._answer_if_begun(self._rounds.let_in(alone=False))
        there = self._there()
        if not there:
            return replies + self._skip()
        if self._held.keys() >= there:
            self._rounds.number += 1
            self._batch, self._owed, self._held = dict(sorted(self._held.items())), there, {}
            return replies + self._multiply()
        return replies

    def _there(self) -> set[int]:
        """Gives the workers who take part in the batch under way."""
        numbers, rounds = self._presence.numbers, self._rounds
        return {
            n for rank, n in numbers.items() if self._presence.is_there(rank) and not rounds.is_outside(n)
        }

    def _skip(self) -> list[Reply]:
        """Goes on to the batch of a successor, since nobody else is there; others may have had the ones before."""
        self._held.clear()
        number = self._rounds.number
        entered = self._rounds.let_in(alone=True)
        skipped = self._rounds.number - number
        self._void += skipped
        told = [reply for _ in range(skipped) for reply in self._parts.offer(_names(()))]
        return told + self._answer_if_begun(entered) + self._decide()

    def _multiply(self) -> list[Reply]:
        """Tells the others this shard's part of all products; or, if a worker is missing, first who is not."""
        whole = len(self._batch) == len(self._steps) and self._weighs
        return self._parts.offer(self._products() if whole else _names(self._batch)) + self._decide()

    @property
    def _weighs(self) -> bool:
        return any(message.weight > 0 for message in self._batch.values())

    def _products(self) -> Tensor:
        """Makes the batch's gradient, and this shard's part of all products."""
        weights = [message.weight for message in self._batch.values()]
        gradient = mean([payload(message) for message in self._batch.values()], weights)
        return self._curvature.products(gradient)

    def _decide(self) -> list[Reply]:
        """Steps, once all servers' products are there."""
        while self._void or self._batch:
            parts = self._parts.all()
            if parts is None:
                return []
            if self._void:  # nobody makes anything of it
                self._void -= 1
            elif all(part.dim() == 2 for part in parts):
                return self._step(summed(parts))
            else:
                return self._agree([part.tolist() for part in parts if part.dim() == 1])
        return []

    def _agree(self, named: list[list[int]]) -> list[Reply]:
        """Takes the gradients that all servers have; of a lost worker's, others come again."""
        self._batch = {n: held for n, held in self._batch.items() if all(n in names for names in named)}
        if not self._weighs:
            return self._end_batch()
        return self._parts.offer(self._products()) + self._decide()

    def _step(self, gram: Tensor) -> list[Reply]:
        self._curvature.advance(gram, max(message.learning_rate for message in self._batch.values()))
        for number, message in self._batch.items():
            if message.weight > 0:
                self.staleness[self.version - message.version] += message.step + 1 - self._steps[number]
        self.version += 1
        return self._end_batch()

    def _end_batch(self) -> list[Reply]:
        batch, self._batch = self._batch, {}
        for number, message in batch.items():
            self._steps[number] = message.step + 1
        owed, self._owed = sorted(self._owed), set()
        return self._answer_if_begun(owed) + self._gather() + self._answer_final()

    def _answer_if_begun(self, workers: list[int]) -> list[Reply]:
        """Answers with the parameters; as soon as there are some."""
        sources = [self._presence.pushers[worker] for worker in workers]
        if not self._shard.ready:
            self._presence.asking += sources
            return []
        return [self._answer(source) for source in sources]

    def _answer_final(self) -> list[Reply]:
        final = self._presence.ready_to_end
        due = final is not None and self._shard.ready and not self._batch
        return [self._answer(final)] if due and final is not None else []

    def _answer(self, source: int) -> Reply:
        step = self._steps[self._presence.numbers[source]]
        values = self._shard.shown()
        return source, Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=self._stop)


def _names(workers: Iterable[int]) -> Tensor:
    return torch.tensor(list(workers), dtype=torch.int64)
