"""Keeper of one worker's parameters in AD-PSGD, and the worker's place among its partners.

The keeper handles messages one by one, so every change of the parameters is atomic:

    worker's main thread          its keeper, in the background          a partner's keeper
    begin step ───────────────▶  VECTOR x_i ───────────────────────────▶ d = (x_i - x_j)/2,  x_j += d
    forward, backward             (continues answering others)                      │
    update ───────────────────▶  x_i -= d  ◀──────────────────── DIFFERENCE d ──────┘
      ◀── the new parameters ──── x_i -= lr * g

A keeper never waits for another: it handles a message and replies, or records that an input is still missing. So there
are no cyclic waits between keepers, even if some are slow or fail. It does no communication itself: `on_message` and
`on_loss` return replies.

Workers have two colors, and every pair has one of each: active workers send requests, passive workers answer them.
Edges of the topology between workers of the same color are dropped. Colors alternate by worker index; where the
remaining graph would be disconnected, they alternate by distance from worker 0, which keeps all shortest paths to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from threading import Lock
from typing import NamedTuple

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.topology import Topology, unreached
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan, update_as


@dataclass(frozen=True)
class Place:
    """One worker's place in the topology.

    Attributes:
        rank: rank of the worker.
        workers: ranks of all workers; the first, worker 0, is passive, and admits and releases the others.
        partners: ranks of the workers that it averages with, in ascending order.
        active: whether it sends requests; else it answers them.
    """

    rank: int
    workers: tuple[int, ...]
    partners: tuple[int, ...]
    active: bool

    @property
    def leads(self) -> bool:
        """Whether it is worker 0."""
        return self.rank == self.workers[0]

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks of all other workers."""
        return tuple(rank for rank in self.workers if rank != self.rank)

    def partner(self, step: int, absent: set[int]) -> int | None:
        """Return the random partner of a step among the present ones, a function of rank and step; None: no partner."""
        there = [rank for rank in self.partners if rank not in absent]
        return Random(f"{self.rank} asks at step {step}").choice(there) if there else None


def place_of(topology: Topology, workers: Sequence[int], index: int) -> Place:
    """Return the place of a worker.

    Args:
        topology: topology of the workers; edges of all turns of its schedule are used, without their directions.
        workers: ranks of the workers.
        index: index of the worker.
    """
    colors = _colors(topology, len(workers))
    near = [other for other in _around(topology, len(workers))[index] if colors[other] != colors[index]]
    return Place(workers[index], tuple(workers), tuple(workers[other] for other in near), bool(colors[index]))


@cache
def _around(topology: Topology, peers: int) -> tuple[tuple[int, ...], ...]:
    around: list[set[int]] = [set() for _ in range(peers)]
    for turn in range(topology.period(peers)):
        for peer in range(peers):
            for to in topology.targets(peer, peers, turn):
                around[peer].add(to)
                around[to].add(peer)
    return tuple(tuple(sorted(others)) for others in around)


@cache
def _colors(topology: Topology, peers: int) -> tuple[int, ...]:
    """Return 1 for active and 0 for passive workers."""
    around = _around(topology, peers)
    alternating = tuple(peer % 2 for peer in range(peers))

    def other_partition(peer: int) -> list[int]:
        return [other for other in around[peer] if alternating[other] != alternating[peer]]

    if unreached(peers, other_partition) is None:
        return alternating
    distance = {0: 0}
    waiting = [0]
    for peer in waiting:  # grows while it is walked through
        for other in around[peer]:
            if other not in distance:
                distance[other] = distance[peer] + 1
                waiting.append(other)
    return tuple(distance[peer] % 2 for peer in range(peers))


Reply = tuple[int, Message]
ANSWER = 1
"""Tag of a keeper's messages to its own worker."""


class Averaged(NamedTuple):
    """A keeper's answer to a partner's parameters.

    Attributes:
        step: step that its worker is in.
        half: half of the difference between their parameters, `(n,)`; None while the sender has no parameters.
        averages: number of averages of its parameters so far, including this one.
    """

    step: int
    half: Tensor | None = None
    averages: int = 0

    def message(self) -> Message:
        """Return the message to send."""
        return Message(Kind.DIFFERENCE, self.half, version=self.averages, step=self.step)

    @classmethod
    def of(cls, message: Message) -> Averaged:
        """Return the content of a message made by `message`."""
        return cls(message.step, message.tensor, message.version)


class Keeper:
    """Averages with partners, and updates when its own worker has a gradient.

    Messages of its own worker: `DIFFERENCE` (a step begins: send a request to a partner), `PUSH` (a gradient is in the
    flat vector), `PULL` (copy the newest parameters to the flat vector).

    Args:
        place: place of the worker.
        setting: setting of the worker; its flat vector is written only when the worker waits for a reply.

    Attributes:
        place: place of the worker.
        values: parameters, `(n,)`.
        ready: whether the parameters are initialized.
        optimizer: optimizer of the parameters.
        staleness: number of gradients per staleness: averages between the reading of the parameters and the update.
        latest: latest known step of each partner.
        absent: failed partners.
        stop: whether any worker has received a stop request.
        plan: optimizer plan of the current step, where a user's own loop has changed it; else None.
    """

    def __init__(self, place: Place, setting: WorkerSetting) -> None:
        self.place = place
        self.values = setting.flat.vector.clone()
        self.ready = False
        self.optimizer = setting.plan.build(self.values)
        self.staleness: Counter[int] = Counter()
        self.latest: dict[int, int] = {}
        self.absent: set[int] = set()
        self.stop = False
        self.plan: OptimizerPlan | None = None
        self._between_messages = Lock()
        self._flat = setting.flat
        self._averages = self._read = 0
        self._step = 0
        self._asked: int | None = None
        self._push: Message | None = None

    @property
    def step(self) -> int:
        """Current step of its worker."""
        return self._step

    def make_ready(self, step: int) -> None:
        """Start at a step with the parameters of the flat vector."""
        self.values.copy_(self._flat.vector)
        self._step = step
        self.ready = True

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Process a message and return the replies."""
        with self._between_messages:
            return self._take(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Handle the failure of a worker; a pending request to it is dropped."""
        with self._between_messages:
            self.absent.add(rank)
            if self._asked != rank:
                return []
            self._asked = None
            return self._update_if_averaged()

    def copy(self) -> Tensor | None:
        """Return a copy of the parameters between two messages, `(n,)`; None before they are initialized."""
        with self._between_messages:
            return self.values.clone() if self.ready else None

    def answer(self, kind: Kind = Kind.PARAMETERS, step: int = 0) -> Reply:
        """Return the reply to the worker itself; it carries no tensors, which are in shared memory."""
        return self.place.rank, Message(kind, step=step, stop=self.stop, tag=ANSWER)

    def _take(self, source: int, message: Message) -> list[Reply]:
        if source != self.place.rank:
            if message.kind is Kind.VECTOR:
                return self._average(source, message)
            return self._averaged(source, Averaged.of(message))
        if message.kind is Kind.DIFFERENCE:
            return self._ask(message.step)
        if message.kind is Kind.PUSH:
            self._push = message
            return self._update_if_averaged()
        self._show()
        return [self.answer()]

    def _ask(self, step: int) -> list[Reply]:
        """Send the parameters to a partner; they do not change before it has answered or failed."""
        self._step = step
        self._asked = self.place.partner(step, self.absent)
        return [] if self._asked is None else [(self._asked, Message(Kind.VECTOR, self.values, step=step))]

    def _average(self, source: int, message: Message) -> list[Reply]:
        self.latest[source] = message.step
        if not self.ready:
            return [(source, Averaged(self._step).message())]
        assert message.tensor is not None, "a request carries parameters"
        half = message.tensor.to(self.values.device).sub_(self.values).mul_(0.5)
        self.values.add_(half)
        self._averages += 1
        return [(source, Averaged(self._step, half, self._averages).message())]

    def _averaged(self, source: int, answer: Averaged) -> list[Reply]:
        self.latest[source] = answer.step
        if self._asked == source:
            self._asked = None
        if answer.half is not None:
            self.values.sub_(answer.half.to(self.values.device))
            self._averages += 1
        return self._update_if_averaged()

    def _update_if_averaged(self) -> list[Reply]:
        """Update, if there is a gradient and no average is pending."""
        push = self._push
        if push is None or self._asked is not None:
            return []
        self._push = None
        if self._flat.change is not None:
            self.values.add_(self._flat.change)
        if push.weight > 0:
            update_as(self.optimizer, self._flat, self.plan, push.learning_rate)
            self.staleness[self._averages - self._read] += 1
        self._step = push.step + 1
        self._show()
        return [self.answer()]

    def _show(self) -> None:
        """Copy the newest parameters to the flat vector, with which the network computes."""
        self._flat.vector.copy_(self.values)
        self._read = self._averages
