"""The keeper of one worker's parameters in AD-PSGD, and the worker's place among its partners.

The keeper handles messages one by one, so that every change to the parameters is atomic:

    worker's main thread          its keeper, in the background          a partner's keeper
    ask ──────────────────────▶  VECTOR x_i ───────────────────────────▶ d = (x_i - x_j)/2,  x_j += d
    forward, backward             (continues answering others)                      │
    update ───────────────────▶  x_i -= d  ◀──────────────────── DIFFERENCE d ──────┘
      ◀── the new parameters ──── x_i -= lr * g

A keeper never waits for another: it handles a message and replies, or notes that something is still missing.
So there are no cyclic waits between keepers, whichever of them is slow or lost. A pure object: `on_message`
and `on_loss` return replies.

Workers are coloured so that every pair has one of each color: active ones ask, passive ones answer. A
topology's edges between workers of one color are left out. Colours alternate by the workers' numbers; where
the remaining graph would be disconnected, they alternate with the distance from worker 0, which keeps every
shortest path to it.
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
    """One worker's place among all.

    Attributes:
        rank: rank of the worker.
        workers: ranks of all; the first one, worker 0, is passive and lets the others in and out.
        partners: ranks of those that it averages with, in ascending order.
        active: whether it asks; else it answers.
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
        """Ranks of all others."""
        return tuple(rank for rank in self.workers if rank != self.rank)

    def partner(self, step: int, absent: set[int]) -> int | None:
        """Draw the partner of a step among those present; the same whenever it is drawn again."""
        there = [rank for rank in self.partners if rank not in absent]
        return Random(f"{self.rank} asks at step {step}").choice(there) if there else None


def place_of(topology: Topology, workers: Sequence[int], index: int) -> Place:
    """Return the place of a worker.

    Args:
        topology: topology of the workers; over all turns of its schedule, whichever way its edges lead.
        workers: their ranks.
        index: index of the worker.
    """
    colours = _colours(topology, len(workers))
    near = [other for other in _around(topology, len(workers))[index] if colours[other] != colours[index]]
    return Place(
        workers[index], tuple(workers), tuple(workers[other] for other in near), bool(colours[index])
    )


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
def _colours(topology: Topology, peers: int) -> tuple[int, ...]:
    """Return 1 for active and 0 for passive workers."""
    around = _around(topology, peers)
    alternating = tuple(peer % 2 for peer in range(peers))

    def of_the_other_colour(peer: int) -> list[int]:
        return [other for other in around[peer] if alternating[other] != alternating[peer]]

    if unreached(peers, of_the_other_colour) is None:
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
        half: half of the difference between their parameters, `(n,)`; None while it has none of its own.
        averages: number of averages that its parameters have taken part in, this one included.
    """

    step: int
    half: Tensor | None = None
    averages: int = 0

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.DIFFERENCE, self.half, version=self.averages, step=self.step)

    @classmethod
    def of(cls, message: Message) -> Averaged:
        """Read what `message` packed."""
        return cls(message.step, message.tensor, message.version)


class Keeper:
    """Averages with partners, and updates when its own worker has a gradient.

    Messages of its own worker: `DIFFERENCE` (a step begins: ask a partner), `PUSH` (a gradient is in the flat vector),
    `PULL` (show the newest parameters).

    Args:
        place: place of the worker.
        setting: setting of the worker; its flat vector is written when the worker asks, and only then.

    Attributes:
        place: place of the worker.
        values: `(n,)`, the parameters.
        ready: whether they are there.
        optimizer: works on them.
        staleness: number of averages that changed the parameters between their reading and the update, for
            each gradient.
        heard: the step that each partner was last heard to be in.
        absent: partners that are lost.
        stop: whether someone was asked to stop.
        plan: plan of the worker's optimizer in the present step, where a user's own loop has changed it.
    """

    def __init__(self, place: Place, setting: WorkerSetting) -> None:
        self.place = place
        self.values = setting.flat.vector.clone()
        self.ready = False
        self.optimizer = setting.plan.build(self.values)
        self.staleness: Counter[int] = Counter()
        self.heard: dict[int, int] = {}
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
        """The step that its worker is in."""
        return self._step

    def make_ready(self, step: int) -> None:
        """Begin at a step with the parameters of the flat vector."""
        self.values.copy_(self._flat.vector)
        self._step = step
        self.ready = True

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Process a message and return the replies."""
        with self._between_messages:
            return self._take(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Handle the loss of a worker; an open question to it will not be answered."""
        with self._between_messages:
            self.absent.add(rank)
            if self._asked != rank:
                return []
            self._asked = None
            return self._update_if_averaged()

    def copy(self) -> Tensor | None:
        """Return the parameters between two messages, `(n,)`; None while there are none."""
        with self._between_messages:
            return self.values.clone() if self.ready else None

    def answer(self, kind: Kind = Kind.PARAMETERS, step: int = 0) -> Reply:
        """Return the answer that the worker waits for; its tensors need not travel."""
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
        """Send the parameters to a partner; they do not change before it has answered, or is lost."""
        self._step = step
        self._asked = self.place.partner(step, self.absent)
        return [] if self._asked is None else [(self._asked, Message(Kind.VECTOR, self.values, step=step))]

    def _average(self, source: int, message: Message) -> list[Reply]:
        self.heard[source] = message.step
        if not self.ready:
            return [(source, Averaged(self._step).message())]
        assert message.tensor is not None, "who asks sends its parameters"
        half = message.tensor.to(self.values.device).sub_(self.values).mul_(0.5)
        self.values.add_(half)
        self._averages += 1
        return [(source, Averaged(self._step, half, self._averages).message())]

    def _averaged(self, source: int, answer: Averaged) -> list[Reply]:
        self.heard[source] = answer.step
        if self._asked == source:
            self._asked = None
        if answer.half is not None:
            self.values.sub_(answer.half.to(self.values.device))
            self._averages += 1
        return self._update_if_averaged()

    def _update_if_averaged(self) -> list[Reply]:
        """Update, once there is a gradient and no average is pending before it."""
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
        """Let the network compute with the newest parameters."""
        self._flat.vector.copy_(self.values)
        self._read = self._averages
