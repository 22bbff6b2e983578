"""Elastic averaging: the shared configuration, the worker with its own steps, and the server of the center.

The forms are `easgd`, `eamsgd` and, with other pulls, `periodic_averaging`; their texts have papers, rules
and departures. They differ in a worker's own step, and in how far a pull moves the two sides.

Stability: on f(x) = x^2 / 2, with learning rate h, N workers and beta = N alpha, the iteration contracts for
h in [0, 2] and

    asynchronous, one after the other    alpha <= (4 - 2 h) / (4 - h)
    synchronous                          alpha <= 2 (2 - h) / (2 + N (2 - h))

A worker exchanges while it computes a gradient, which is that of the value before the pull; so the exchange
hides behind the computation:

    begin               gradients_ready
      x ──── forward, backward at x ────▶ g ;  x -= d ;  x -= lr g
      └─ VECTOR(x) ─▶ center ─ DIFFERENCE(d) ─┘

Its own step between two exchanges is the optimizer's (`PlainStep`), or one with Nesterov's momentum around it
(`NesterovStep`). The flat vector holds the point at which the next gradient is computed. With momentum that
is ahead of the worker's parameters, which are therefore kept apart.

A server holds a shard of the center:

    worker ── VECTOR(x) ─▶ d = alpha (x - center);  center += d
           ◀─ DIFFERENCE(d) ──────────────────────  the worker subtracts the same d

Synchronously it holds the vectors until there is one of every worker, makes all differences with the same
center, and adds them in the workers' order; a replacement enters at the same exchange on all servers. A worker
that leaves pulls at the center for a last time, and is not pulled.

With another number of workers the center stays, and new workers begin there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.composition.served import WithServers
from polyrhythm.strategies.parameter_server.serving.admission import admit_vector, payload
from polyrhythm.strategies.parameter_server.serving.gate import Decision, Gate, RoundsGate
from polyrhythm.strategies.parameter_server.serving.own_model import OwnModelWorker, of_own_models
from polyrhythm.strategies.parameter_server.serving.push_pull import ServerLink
from polyrhythm.strategies.parameter_server.serving.rule import Applied, Contribution, Given, Rule
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.resharding import (
    Resharding,
)
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import OWN, Part, State, StateField, Stateful
from polyrhythm.strategies.strategy import Paper, Remarks, Traits
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class ElasticRule:
    """Strength, interval and mode of the pulls between workers and the center.

    Attributes:
        alpha: share of the difference that each side moves by.
        tau: steps of a worker between two exchanges.
        together: whether all workers exchange at the same time.
    """

    alpha: float
    tau: int
    together: bool

    def due(self, step: int) -> bool:
        """Return whether a worker exchanges in its step of this number."""
        return step % self.tau == 0

    def largest_stable_alpha(self, workers: int, learning_rate: float) -> float:
        """Return the largest alpha that is stable where the loss has curvature 1; at most 0 if none is."""
        left = 2 - learning_rate
        if self.together:
            return 2 * left / (2 + workers * left) if left > 0 else 0.0
        return 2 * left / (4 - learning_rate) if left > 0 else 0.0

    def caution(self, workers: int, learning_rate: float) -> str:
        """Return in one line what is wrong where alpha is out of the stable range; empty if nothing is."""
        bound = self.largest_stable_alpha(workers, learning_rate)
        if self.alpha <= bound:
            return ""
        way = "synchronous" if self.together else "asynchronous"
        return (
            f"alpha={self.alpha:g} is above {bound:.4g}, up to which {way} elastic averaging of {workers} workers is "
            f"stable at learning rate {learning_rate:g} (on a quadratic of curvature 1): lower alpha or beta"
        )


PAPER = Paper(
    "Zhang, Choromanska, LeCun", "Deep learning with Elastic Averaging SGD", "NIPS", 2015, "1412.6651"
)


class ElasticAveraging(WithServers, Remarks):
    """Workers train alone, and every few steps they and a center pull at each other.

    Attributes:
        mode: whether a worker exchanges by itself, or all together.
        tau: steps of a worker between two exchanges.
        beta: sum of all workers' pulls at the center.
        alpha: share of the difference by which both sides move; None: beta / N.
        servers: number of servers of the center, each with an equal shard.
    """

    why_not_compressed: ClassVar[str] = (
        "worker and center move toward each other by one step, and each would know another part of it: use local_sgd"
    )

    paper: ClassVar[Paper] = PAPER
    plain_steps: ClassVar[bool]

    mode: Literal["asynchronous", "synchronous"] = "asynchronous"
    tau: Count = 4
    beta: NonNegative = 0.9
    alpha: NonNegative | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if self.alpha is not None and "beta" in self.model_fields_set:
            raise RequestError(f"strategy {self.name}: alpha is beta / N, so give only one of them")
        return self

    def rule(self, workers: int) -> ElasticRule:
        """Return the rule for `workers` workers."""
        alpha = self.beta / workers if self.alpha is None else self.alpha
        return ElasticRule(alpha=alpha, tau=self.tau, together=self.mode == "synchronous")

    def caution(self, workers: int, learning_rate: float) -> str:
        return self.rule(workers).caution(workers, learning_rate)

    def traits(self, workers: int) -> Traits:
        together = self.mode == "synchronous"
        return replace(
            super().traits(workers),
            lockstep=together,
            local_models=True,
            waits_for_slower=together,
            draws=not together,
            exchange_every=self.tau,
            gradients=workers,
            counts_samples=False,
        )

    def resharding(self, before: int, after: int) -> Resharding:
        return of_own_models(ElasticWorker, after)

    @abstractmethod
    def local_step(self, setting: WorkerSetting) -> LocalStep:
        """Make a worker's own step."""

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return ElasticWorker(setting, self.rule(setting.workers.size), self.local_step(setting))

    def server(self, setting: ServerSetting) -> ServerPart:
        workers = setting.roles.workers
        return center_session(workers, self.rule(len(workers)))


class ElasticWorker(OwnModelWorker["CenterLink"]):
    """Steps on its own, and exchanges every `tau` steps."""

    fields = (*OwnModelWorker.fields, StateField("", Part, OWN, at="_local"))

    def __init__(self, setting: WorkerSetting, rule: ElasticRule, local: LocalStep) -> None:
        super().__init__(setting, CenterLink(setting, local.own))
        self._rule = rule
        self._local = local
        self.follows = OptimizerSource.OBJECT if isinstance(local, PlainStep) else OptimizerSource.NOTHING
        self._exchanging = False

    @classmethod
    def fits(cls, step: int, pushed: Any, known: Sequence[int]) -> bool:
        """Return whether the state is not older than this worker's last exchange: else steps would be taken twice."""
        return step >= min(known)

    def take_over(self, values: Tensor, known: Sequence[int]) -> None:
        self._local.begin_from(values)

    def begin(self, step: Step) -> None:
        self._local.look_ahead()
        self._exchanging = self._rule.due(step.number)
        if self._exchanging:
            self._link.offer(step)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        stop = self._exchanging and self._link.take()
        self._exchanging = False
        self._done = step.number + 1
        if step.weight > 0:
            self._local.update(self._flat.gradients, learning_rate)
        else:
            self._local.look_ahead()
        return stop

    def settle(self) -> None:
        self._local.rest()

    def catch_up(self) -> None:
        self._local.look_ahead()

    def depart(self) -> None:
        """Pull at the center for a last time and leave."""
        self._link.part(self._done)


class CenterLink(ServerLink):
    """Exchanges a worker's parameters with the servers that hold the center.

    Args:
        own: `(size,)`, the worker's parameters.
    """

    def __init__(self, setting: WorkerSetting, own: Tensor) -> None:
        super().__init__(setting)
        self._vector = own
        self._offered: list[Handle] = []

    def offer(self, step: Step) -> None:
        """Start an exchange: send the worker's parameters, which must not change before `take`."""
        self._offered = [
            self._ask(position, Message(Kind.VECTOR, self._vector[shard], step=step.number, stop=step.stop))
            for position, shard in enumerate(self._shards)
        ]

    def take(self) -> bool:
        """Take the differences off the worker's parameters, as the center has gained them; return whether to stop."""
        stop, vector = False, self._vector
        differences = [self._answer(position) for position in range(len(self._servers))]
        for handle in self._offered:
            handle.wait()
        for shard, difference in zip(self._shards, differences, strict=True):
            vector[shard].sub_(payload(difference).to(vector.device))
            stop |= difference.stop
        return stop

    def part(self, steps: int) -> None:
        """Pull at the center for a last time, after `steps` steps, and leave."""
        for server, shard in zip(self._servers, self._shards, strict=True):
            self._network.send(server, Message(Kind.LEAVE, self._vector[shard], step=steps))


class LocalStep(Stateful):
    """A worker's own step.

    Attributes:
        own: `(size,)`, the worker's parameters, which pull and are pulled.
    """

    fields: ClassVar[tuple[StateField, ...]] = (
        StateField("own", Tensor, OWN, at="own"),
        StateField("optimizer", Part, OWN),
    )
    own: Tensor

    def begin_from(self, parameters: Tensor) -> None:
        """Take over parameters, `(size,)`, without any momentum."""
        raise NotImplementedError

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        """Step from `own`, with a gradient computed at the flat vector as it was; leaves the vector ahead."""
        raise NotImplementedError

    def look_ahead(self) -> None:
        """Let the flat vector hold the point at which the next gradient is to be computed: by default `own`."""

    def rest(self) -> None:
        """Let the flat vector hold the worker's parameters: by default it always does."""


class PlainStep(LocalStep):
    """The optimizer's own step, on the flat vector.

    Args:
        vector: `(size,)`, the flat parameters.
    """

    def __init__(self, vector: Tensor, plan: OptimizerPlan) -> None:
        self.own = vector
        self._plan = plan
        self._optimizer = plan.whole(vector)

    def begin_from(self, parameters: Tensor) -> None:
        self.own.copy_(parameters)
        if self._plan.own is not None:
            self._plan.own.inner.state.clear()
        self._optimizer = self._plan.whole(self.own)

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        self._optimizer.step(gradient, learning_rate)


class NesterovStep(LocalStep):
    """The optimizer's step from a point ahead; for SGD, `v' = delta v - lr g(x + delta v)` and `x' = x + v'`.

    Args:
        vector: `(size,)`, the flat parameters.
        plan: plan of the optimizer, without a momentum of its own.
        delta: share of the velocity that is kept.
    """

    fields = (*LocalStep.fields, StateField("velocity", Tensor, OWN))

    def __init__(self, vector: Tensor, plan: OptimizerPlan, delta: float) -> None:
        self.own = vector.clone()
        self._velocity = torch.zeros_like(vector)
        self._vector = vector
        self._plan = plan
        self._optimizer = plan.build(vector)
        self._delta = delta

    def begin_from(self, parameters: Tensor) -> None:
        self.own.copy_(parameters)
        self._velocity.zero_()
        self._optimizer = self._plan.build(self._vector)
        self.look_ahead()

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        self.look_ahead()  # the center has pulled since
        self._optimizer.step(gradient, learning_rate)
        torch.sub(self._vector, self.own, out=self._velocity)
        self.own.copy_(self._vector)
        self.look_ahead()

    def look_ahead(self) -> None:
        torch.add(self.own, self._velocity, alpha=self._delta, out=self._vector)

    def rest(self) -> None:
        self._vector.copy_(self.own)

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.look_ahead()


def center_session(workers: tuple[int, ...], rule: ElasticRule, pull: float = 1.0) -> ServerSession:
    """Make the server of a shard of the center; `pull` is how far a worker moves for each that the center moves."""
    return ServerSession(workers, CenterRule(rule, len(workers), pull))


class CenterRule(Rule):
    """A shard of the center, which moves toward every worker's parameters, as these move toward it.

    Its versions are exchanges; where workers exchange together, an exchange of all is one. A gradient's staleness is
    number of versions unknown to its worker when it reached the center.

    Args:
        rule: movement of the center, and whether all exchange at the same time.
        pull: ratio of a worker's movement to the center's.
    """

    contributes = Kind.VECTOR
    last = -1  # a worker reports its number of steps
    repeats = False
    parts = True
    forgets = True
    admit = staticmethod(admit_vector)

    def __init__(self, rule: ElasticRule, workers: int, pull: float) -> None:
        super().__init__(CenterGate(workers) if rule.together else AloneGate())
        self._alpha = rule.alpha
        self._pull = pull
        self._latest: dict[int, int] = {}
        """Version of the center that each worker received last: the first, or that after its last exchange."""
        self._begun = False
        self._copy: Tensor | None = None

    def begin(self, values: Tensor) -> None:
        if self._begun:
            raise RefusedMessage(Reason.ORDER, "initial parameters arrived a second time")
        if not values.is_floating_point():
            raise RefusedMessage(Reason.PAYLOAD, f"initial parameters arrived as {values.dtype}")
        self._begun = True
        if not self.ready:
            self.values, self.ready = values, True

    def apply(self, batch: Sequence[Contribution], version: int) -> Applied:
        """Make all differences with the same center, and add them in the workers' order."""
        # The vectors are ours, and become the differences where they are: all of them before the center moves.
        differences = [entry.gradient.sub_(self.values).mul_(self._alpha) for entry in batch]
        staleness: dict[int, int] = {}
        answers: dict[int, Given] = {}
        for entry, difference in zip(batch, differences, strict=True):
            pusher = entry.pusher
            self.values.add_(difference)
            if entry.fresh > 0:
                unheard = version - self._latest.get(pusher, version)
                staleness[unheard] = staleness.get(unheard, 0) + entry.fresh
            self._latest[pusher] = version + 1
            given = difference if self._pull == 1 else difference.mul_(self._pull)
            answers[pusher] = Given(Kind.DIFFERENCE, given, entry.step + 1)
        self._copy = None
        return Applied(batch, 1, staleness, answers)

    def answer(self, pusher: int, version: int) -> Tensor:
        self._latest.setdefault(pusher, version)
        if self._copy is None:
            self._copy = self.values.clone()
        return self._copy

    def enter(self, pusher: int) -> None:
        self._latest.pop(pusher, None)

    def state(self) -> State:
        return {"values": self.values}, {}

    def load_state(self, state: State) -> None:
        self.values = state[0]["values"]
        self.ready = len(self.values) > 0


class AloneGate(Gate):
    """A gate at which every worker exchanges by itself."""

    def part(self, pusher: int) -> Decision:
        """Exchange at once; the worker is not pulled."""
        return Decision(apply=(pusher,))


class CenterGate(RoundsGate):
    """A gate at which all workers exchange at the same time."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._parting: set[int] = set()
        """Workers that have left, with a last vector that waits for the others'."""

    def check_turn(self, pusher: int) -> None:
        if pusher in self.held:
            raise RefusedMessage(Reason.ORDER, f"worker {pusher} sent its parameters a second time")

    def arrive(self, pusher: int, step: int) -> Decision:
        self.held.add(pusher)
        return self.decide()

    def part(self, pusher: int) -> Decision:
        """Hold the last vector of a worker for the next exchange, which does not wait for it."""
        self.present.discard(pusher)
        self._parting.add(pusher)
        return self.decide()

    def leave(self, pusher: int) -> Decision:
        self.present.discard(pusher)
        self.held.discard(pusher)
        self.rounds.forget(pusher)
        return self.decide()

    def join(self, pusher: int) -> None:
        self._parting.discard(pusher)
        self.rounds.invite(pusher, later=False)

    def decide(self) -> Decision:
        if self.rounds.held_up:
            return Decision()
        entered = self.admit(alone=False)
        apply: list[int] = []
        answer: list[int] = []
        if (self.held or self._parting) and self.held >= self.present:
            apply, answer = sorted(self.held | self._parting), sorted(self.held)
            self.rounds.number += bool(answer)
            self.held, self._parting = set(), set()
        entered += self.admit(alone=not self.present)
        return Decision(apply=tuple(apply), answer=(*answer, *entered))
