"""The server of elastic averaging: a shard of the centre.

    worker ── VECTOR(x) ─▶ d = alpha (x - centre);  centre += d
           ◀─ DIFFERENCE(d) ──────────────────────  the worker takes the same d off

Synchronously it holds the vectors until there is one of everybody, makes all differences with the same centre, and adds
them in the workers' order; a successor comes in at the same exchange on all servers. Who leaves pulls at the centre for
a last time, and is not pulled.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.elastic.rule import ElasticRule
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare, admit_vector, payload
from polyrhythm.strategies.parameter_server.serving.presence import Presence
from polyrhythm.strategies.parameter_server.serving.rounds import Rounds
from polyrhythm.strategies.state import State

Reply = tuple[int, Message]


class CentreServer:
    """One server; see `ServerPart`.

    Args:
        workers: their ranks.
        rule: how far both sides move.

    Attributes:
        version: exchanges so far; where workers exchange together, an exchange of all is one.
        staleness: how many gradients the centre heard of, by the versions of it that their worker had not heard of.
        centre: `(n,)`, its shard; empty until worker 0 has sent it.
    """

    def __init__(self, workers: tuple[int, ...], rule: ElasticRule) -> None:
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.centre = torch.empty(0)
        self._rule = rule
        self._presence = Presence(workers)
        self._rounds = Rounds(len(workers))
        self._held: dict[int, Message] = {}
        self._steps = [0] * len(workers)
        self._seen: dict[int, int] = {}
        self._stop = False
        self._begun = False
        self._resumed = False

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""
        return self._presence.done

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each worker the centre has heard of; a successor goes on from there."""
        return dict(zip(self._presence.pushers, self._steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a rank and gives the replies.

        Raises:
            RefusedMessage: a message that no worker of ours sends.
        """
        number = self._presence.number(source, message.kind)
        if message.kind is Kind.VECTOR:
            self._admit(number, message)
            return self._exchange(number, message)
        if message.kind is Kind.PARAMETERS:
            return self._initialise(number, payload(message))
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.LEAVE:
            return self._leave(source, message)
        if message.kind is Kind.JOIN:
            return self._come_in(number, message)
        raise RefusedMessage(
            Reason.KIND, f"a centre cannot do anything with {message.kind.name} from rank {source}"
        )

    def on_loss(self, rank: int) -> list[Reply]:
        """Forgets a worker, until a successor pulls; what it has pulled the centre by stays."""
        if rank not in self._presence.numbers or not self._presence.lose(rank):
            return []
        return self._go_on_without(rank)

    def state(self) -> State:
        """Gives all that a resumed server needs, the centre included."""
        return {"values": self.centre}, {
            "version": self.version,
            "steps": list(self._steps),
            "staleness": {str(key): count for key, count in self.staleness.items()},
        }

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        tensors, facts = state
        self.centre = tensors["values"]
        self.version = facts["version"]
        self._steps = list(facts["steps"])
        self.staleness = Counter({int(key): count for key, count in facts["staleness"].items()})
        self._resumed = True

    def _admit(self, worker: int, message: Message) -> None:
        if self._held.get(worker) is not None:
            raise RefusedMessage(Reason.ORDER, f"worker {worker} sent its parameters a second time")
        admit_vector(message, self.centre)

    def _initialise(self, worker: int, values: Tensor) -> list[Reply]:
        if worker != 0:
            raise RefusedMessage(Reason.SENDER, f"worker {worker} sent the parameters to begin with")
        if self._begun:
            raise RefusedMessage(Reason.ORDER, "initial parameters came a second time")
        if not values.is_floating_point():
            raise RefusedMessage(Reason.PAYLOAD, f"initial parameters came as {values.dtype}")
        self._begun = True
        if not self._resumed:
            self.centre = values
        asking, self._presence.asking = self._presence.asking, []
        return [self._answer(source) for source in asking]

    def _pull(self, source: int, message: Message) -> list[Reply]:
        admit_bare(message)
        if message.stop and self._presence.numbers[source] != 0:
            raise RefusedMessage(Reason.SENDER, f"rank {source} asked for the final parameters")
        if message.stop:
            self._presence.final = source
            return self._answer_final()
        number = self._presence.numbers[source]
        succeeds = not self._presence.is_there(source)
        if not self._presence.enter(source):
            return [(source, Message(Kind.LEAVE))]
        if succeeds:  # it takes its predecessor's last steps again, if they still wait for the others'
            self._forget(number)
        if succeeds and self._rule.together:
            self._rounds.invite(number, later=False)
            return [(source, Message(Kind.JOIN, step=self._rounds.number))]
        return self._answer_if_begun([number])

    def _come_in(self, worker: int, message: Message) -> list[Reply]:
        admit_bare(message._replace(step=0))
        self._rounds.accept(worker, message.step)
        return self._apply_if_complete()

    def _answer_if_begun(self, workers: list[int]) -> list[Reply]:
        """Answers with the centre; as soon as there is one."""
        sources = [self._presence.pushers[worker] for worker in workers]
        if not len(self.centre):
            self._presence.asking += sources
            return []
        return [self._answer(source) for source in sources]

    def _leave(self, source: int, message: Message) -> list[Reply]:
        if message.tensor is None:
            admit_bare(message)
        elif self._presence.is_there(source):
            self._admit(self._presence.numbers[source], message)
        there = self._presence.leave(source)
        if message.tensor is None or not there:
            return self._go_on_without(source) if there else []
        worker = self._presence.numbers[source]
        self._held[worker] = message
        replies = self._apply_if_complete() + self._answer_final()
        if worker not in self._held:
            self._forget(worker)
        return replies

    def _go_on_without(self, rank: int) -> list[Reply]:
        self._forget(self._presence.numbers[rank])
        return self._apply_if_complete() + self._answer_final()

    def _forget(self, worker: int) -> None:
        """A worker is gone; its successor is another."""
        self._held.pop(worker, None)
        self._seen.pop(worker, None)
        self._rounds.forget(worker)

    def _exchange(self, worker: int, message: Message) -> list[Reply]:
        self._stop |= message.stop
        self._held[worker] = message
        return self._apply_if_complete()

    def _apply_if_complete(self) -> list[Reply]:
        """Makes the differences of all vectors that are held, unless one is still missing."""
        if not self._rule.together:
            return self._apply() if self._held else []
        if self._rounds.held_up:
            return []
        entered, replies = self._rounds.let_in(alone=False), []
        waiting = sum(message.kind is Kind.VECTOR for message in self._held.values())
        if self._held and waiting >= self._together:
            replies = self._apply()
            self._rounds.number += bool(waiting)
        entered += self._rounds.let_in(alone=not self._together)
        return replies + self._answer_if_begun(entered)

    @property
    def _together(self) -> int:
        """How many take part in the exchange under way."""
        return self._presence.there - self._rounds.outside

    def _apply(self) -> list[Reply]:
        held, self._held = sorted(self._held.items()), {}
        # The vectors are ours, and become the differences where they are: all of them before the centre moves.
        differences = [payload(message).sub_(self.centre).mul_(self._rule.alpha) for _, message in held]
        replies = []
        for (worker, message), difference in zip(held, differences, strict=True):
            self.centre.add_(difference)
            self._count(worker, message.step)
            reply = Message(Kind.DIFFERENCE, difference, self.version + 1, message.step, stop=self._stop)
            if message.kind is Kind.VECTOR:
                replies.append((self._presence.pushers[worker], reply))
        self.version += 1
        return replies

    def _count(self, worker: int, steps: int) -> None:
        """Counts the gradients that a worker has added since its last exchange."""
        if steps > self._steps[worker]:
            unheard = self.version - self._seen.get(worker, self.version)
            self.staleness[unheard] += steps - self._steps[worker]
            self._steps[worker] = steps
        self._seen[worker] = self.version + 1

    def _answer_final(self) -> list[Reply]:
        final = self._presence.ready_to_end
        return [] if final is None or not len(self.centre) else [self._answer(final)]

    def _answer(self, source: int) -> Reply:
        worker = self._presence.numbers[source]
        step = self._steps[worker]
        self._seen.setdefault(worker, self.version)
        values = self.centre.clone()  # it leaves while others pull at the centre
        return source, Message(Kind.PARAMETERS, values, version=self.version, step=step, stop=self._stop)
