"""The keeper of one worker's parameters: takes messages one by one, so that whatever happens to them is atomic.

    worker's main thread          its keeper, in the background          a partner's keeper
    ask ──────────────────────▶  VECTOR x_i ───────────────────────────▶ d = (x_i - x_j)/2,  x_j += d
    forward, backward             (goes on answering others)                        │
    update ───────────────────▶  x_i -= d  ◀──────────────────── DIFFERENCE d ──────┘
      ◀── the new parameters ──── x_i -= lr * g

A keeper never waits for another: it takes what comes and answers, or notes that something is still to come. So keepers
cannot wait for each other in a circle, whoever is slow or dies. A pure object: `on_message` and `on_loss` give replies.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.gossip.pairing.place import Place
from polyrhythm.strategies.worker_setting import WorkerSetting

Reply = tuple[int, Message]
ANSWER = 1
"""Tag of what a keeper says to its own worker."""


class Keeper:
    """Averages with partners, and updates when its own worker has a gradient.

    Messages of its own worker: `DIFFERENCE` (a step begins: ask a partner), `PUSH` (a gradient is in the flat vector),
    `PULL` (show the newest parameters).

    Args:
        place: of the worker.
        setting: of the worker; its flat vector is written when the worker asks, and only then.

    Attributes:
        place: of the worker.
        values: `(n,)`, the parameters.
        ready: whether they are there.
        optimizer: works on them.
        staleness: how many averages changed the parameters between their reading and the update, for each gradient.
        heard: the step that each partner was last heard to be in.
        absent: partners that are lost.
        stop: whether someone was asked to stop.
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
        """Begins at a step with the parameters of the flat vector."""
        self.values.copy_(self._flat.vector)
        self._step = step
        self.ready = True

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message and gives what is to be sent."""
        with self._between_messages:
            return self._take(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """A worker is gone; if it was asked for something, nothing will come of it."""
        with self._between_messages:
            self.absent.add(rank)
            if self._asked != rank:
                return []
            self._asked = None
            return self._update_if_averaged()

    def copy(self) -> Tensor | None:
        """Gives the parameters as they are between two messages, `(n,)`; None while there are none."""
        with self._between_messages:
            return self.values.clone() if self.ready else None

    def answer(self, kind: Kind = Kind.PARAMETERS, step: int = 0) -> Reply:
        """Makes what the worker waits for; its tensors need not travel."""
        return self.place.rank, Message(kind, step=step, stop=self.stop, tag=ANSWER)

    def _take(self, source: int, message: Message) -> list[Reply]:
        if source != self.place.rank:
            if message.kind is Kind.VECTOR:
                return self._average(source, message)
            return self._averaged(source, message)
        if message.kind is Kind.DIFFERENCE:
            return self._ask(message.step)
        if message.kind is Kind.PUSH:
            self._push = message
            return self._update_if_averaged()
        self._show()
        return [self.answer()]

    def _ask(self, step: int) -> list[Reply]:
        """Sends the parameters to a partner; they do not change before it has answered, or is lost."""
        self._step = step
        self._asked = self.place.partner(step, self.absent)
        return [] if self._asked is None else [(self._asked, Message(Kind.VECTOR, self.values, step=step))]

    def _average(self, source: int, message: Message) -> list[Reply]:
        """Goes half the way to a partner, and tells it the half that is left to it."""
        self.heard[source] = message.step
        if not self.ready:
            return [(source, Message(Kind.DIFFERENCE, step=self._step))]
        assert message.tensor is not None, "who asks sends its parameters"
        half = message.tensor.to(self.values.device).sub_(self.values).mul_(0.5)
        self.values.add_(half)
        self._averages += 1
        return [(source, Message(Kind.DIFFERENCE, half, version=self._averages, step=self._step))]

    def _averaged(self, source: int, message: Message) -> list[Reply]:
        """Goes the other half of the way."""
        self.heard[source] = message.step
        if self._asked == source:
            self._asked = None
        if message.tensor is not None:
            self.values.sub_(message.tensor.to(self.values.device))
            self._averages += 1
        return self._update_if_averaged()

    def _update_if_averaged(self) -> list[Reply]:
        """Updates, once there is a gradient and nothing more is to come before it."""
        push = self._push
        if push is None or self._asked is not None:
            return []
        self._push = None
        if push.weight > 0:
            self.optimizer.step(self._flat.gradients, push.learning_rate)
            self.staleness[self._averages - self._read] += 1
        self._step = push.step + 1
        self._show()
        return [self.answer()]

    def _show(self) -> None:
        """Lets the network compute with the newest parameters."""
        self._flat.vector.copy_(self.values)
        self._read = self._averages
