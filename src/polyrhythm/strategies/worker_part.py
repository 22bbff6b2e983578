"""The worker's side of a strategy: the calls that a training loop makes around the forward and backward pass.

`WorkerPart` has all calls; a strategy implements `start`, `gradients_ready` and those that it needs. Parts with logged
exchanges derive from `Logged`, which has `start`. Parts that compute a network's layers themselves are in
`divided_network`.

A worker part is built from a `WorkerSetting`; a `Step` describes one of its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.log import MODELS, NEWEST
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.state import OWN, State, StateField, Stateful
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


@dataclass(slots=True)
class Step:
    """One gradient of one worker, known before it is computed.

    Only the learning rate is changed after construction. The class is not frozen because one is constructed per step,
    and a frozen one takes four times as long.

    Attributes:
        number: number of the worker's steps before this one.
        weight: number of samples averaged in the gradient, in units of a full batch; 0 for an empty batch.
        stop: whether this worker has received a stop request.
        share: this worker's share of a full global batch, divided by an equal share.
        plan: optimizer plan at this step, in a user's own loop that has changed more than the learning rate;
            None: the initial plan.
        learning_rate: learning rate of the update, where it is known before the backward pass; else None.
    """

    number: int
    weight: float = 1.0
    stop: bool = False
    share: float = 1.0
    plan: OptimizerPlan | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class WorkerSetting:
    """Arguments of a worker part's constructor.

    Attributes:
        network: communicator of all ranks of the run.
        workers: communicator of the workers only; `workers.rank` is this worker's index.
        roles: roles of the ranks of `network`.
        flat: the model's parameters and gradients.
        plan: plan of the user's optimizer.
        steps: number of steps of every worker in the whole run; None where it is unknown (a user's own loop).
        succeeds: whether this worker is the replacement of a failed one, and the servers hold the complete state.
        leader_returns: whether rank 0 is replaced when it fails.
        joined: callback of parts with `Traits.mean_updates`; receives the communicator of the synchronous workers
            before the first step and whenever the members change.
    """

    network: Communicator
    workers: Communicator
    roles: RoleAssignment
    flat: FlatParameters
    plan: OptimizerPlan
    steps: int | None = None
    succeeds: bool = False
    leader_returns: bool = False
    joined: Callable[[Communicator], None] = lambda workers: None

    @property
    def initializes(self) -> bool:
        """Whether this worker sends the servers their initial parameters."""
        return self.workers.rank == 0 and not self.succeeds


class OptimizerSource(Enum):
    """Changes in a user's own loop that an update follows, in addition to gradients and learning rates.

    Attributes:
        NOTHING: none; everything else is as at the start.
        PLAN: optimizer options and the set of parameters with a gradient, sent with the step (`Step.plan`).
        OBJECT: everything, since the user's own optimizer object makes the update (`OptimizerPlan.whole`).
    """

    NOTHING = "learning rates"
    PLAN = "options"
    OBJECT = "object"


PLACES = 63
"""Exclusive upper bound of program positions."""


class Writes(Enum):
    """Treatment of parameters that a user's own loop changes in the flat vector between two steps.

    Attributes:
        LOST: overwritten, so the loop is rejected.
        KEPT: kept: training continues from them.
        ADDED: added as a change (`FlatParameters.change`) to the stored copy of the worker's parameters.
        IN_STEP: adopted by servers, where all workers hold, and therefore change, the same parameters.
    """

    LOST = "lost"
    KEPT = "kept"
    ADDED = "added"
    IN_STEP = "synchronous"


WORKER = StateField("worker", int, OWN, at="_rank", loads=False)
"""Index of the worker: a part with this field shares nothing with other workers, and continues from a state of its own
only."""


class WorkerPart(Stateful):
    """A strategy's code on one worker.

    The training loop calls it in this order:

        start ─▶ ( begin ─▶ before_use(b)… forward ─▶ bucket_ready(b)… backward ─▶ gradients_ready )…
              ─▶ settle ─▶ present ─▶ catch_up ─▶ ( … )… ─▶ settle ─▶ end ─▶ release ─▶ close

    Its state is that of a worker other than the parameters, for a checkpoint; `load_state` is called before `start`.

    Attributes:
        staleness: number of applied gradients per staleness, where the worker knows it.
        replicated: whether `state` is the same on all workers, so that one copy of it is enough.
        restored: whether it continues from a state.
        follows: changes in a user's own loop that its updates follow.
        writes: treatment of parameters that such a loop changes between two steps.
        exchanger: object that carries out its logged exchanges; None: none are logged.
        averaged: number of averages of the gradients since the last update, where the part has `average`.
        mean_weight: weight of the latest mean of gradients, in full batches of a worker; the flat gradients hold that
            mean until zeroed. 0 where the part has no `average`.
    """

    replicated: bool = False
    restored: bool = False
    follows: OptimizerSource = OptimizerSource.NOTHING
    writes: Writes = Writes.LOST
    exchanger: Exchanger[Any] | None = None
    averaged: int = 0
    mean_weight: float = 0.0
    _rank: int

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()

    def start(self, step: int) -> int:
        """Agree with the other ranks on the initial parameters.

        Args:
            step: start step of this worker (0, or the step of its checkpoint).

        Returns:
            The step to start at: the servers' record of applied gradients takes precedence over a checkpoint.
        """
        raise NotImplementedError

    def begin(self, step: Step) -> None:
        """Begin a step, before its forward pass, for example by sending parameters."""

    def before_use(self, bucket: int) -> None:
        """Update a bucket before the forward pass of a layer that uses it; every loop calls it after `begin`."""

    def bucket_ready(self, bucket: int) -> None:
        """Note that the gradients of a bucket are final, during the backward pass; buckets are announced in order.

        A loop may still not call it.
        """

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Exchange the gradients, which are final now, and update the parameters.

        Afterwards the loop zeroes the gradients; a part that sends them later sends a copy.

        Args:
            step: current step; its weight may be less than in `begin` if no bucket has been announced.
            learning_rate: learning rate of the update.

        Returns:
            Whether this worker must stop after this step, because a rank received a stop request. Synchronous workers
            all get the same answer at the same step.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Complete pending exchanges and updates, so that the flat vector holds this worker's current model."""

    def end(self) -> None:
        """Leave the other workers.

        On worker 0 the flat vector then holds the run's final parameters, at the latest after `release`.
        """

    def average(self, step: Step, place: int = 0) -> None:
        """Overwrite the gradients with the workers' mean, where every worker holds that of all parameters.

        A loop may then call `average` and `update` instead of `gradients_ready`, and read or change the mean between
        the two calls, for example to clip it. It may be called several times before `update`: gradients may be added
        to those that are a mean already. A parameter is then listed in the flat vector's `without_gradient` only if it
        has no gradient on any worker.

        Args:
            step: step of these gradients; `stop` is ignored.
            place: position of this worker in its program, in [0, `PLACES`); must be equal on all workers.

        Raises:
            OutOfStep: `place` differs between workers; raised on all of them.
        """
        raise NotImplementedError

    def update(self, learning_rate: float) -> None:
        """Update the parameters with the current gradients, unless the latest mean had weight 0."""
        raise NotImplementedError

    def local_step(self, step: Step, learning_rate: float) -> None:
        """Update this worker's parameters with the flat gradients, before the last gradient of a global step.

        Args:
            step: global step; see `Traits.local_steps`.
            learning_rate: learning rate of the update.
        """
        raise NotImplementedError

    def next_step(self, step: int) -> int:
        """Return the step that follows a completed one; this worker skips the steps between (`Traits.skips_steps`).

        A user's own loop cannot skip steps; their gradients are computed and discarded.
        """
        return step + 1

    def present(self) -> Tensor | None:
        """Return the run's current model (a center, a mean), `(size,)`; None for that of rank 0.

        Called on every worker after every epoch but the last, after which `end` leaves the model in the flat vector.
        Training continues from the unchanged flat vector.
        """
        return None

    def catch_up(self) -> None:
        """Apply the others' updates during the evaluation; called on every worker after every epoch but the last."""

    def release(self) -> None:
        """Dismiss the servers when all workers have left; called on rank 0 only."""

    def load_state(self, state: State) -> None:
        if WORKER not in self.fields or state[1]["worker"] == self._rank:
            super().load_state(state)
            self.restored = True

    def check_servers(self) -> None:
        """Find servers that failed since the last request, so that requests are sent to their replacements."""

    def close(self) -> None:
        """End this worker's background work; called last, when no rank needs it any more."""

    def model_in(self, state: State) -> Tensor | None:
        """Return the model in a worker's state, `(size,)`; None where it holds none.

        Args:
            state: result of `state` on any worker.
        """
        return None

    @property
    def has_stopped(self) -> bool:
        """Whether the other workers have stopped at this worker's current step; known after joining or regrouping."""
        return False

    @property
    def reads_images(self) -> bool:
        """Whether this worker takes images as input."""
        return True

    @property
    def write_treatment(self) -> Writes:
        """Treatment of writes: `writes`, or `Writes.KEPT` where the user's own optimizer object makes the updates."""
        return Writes.KEPT if self.follows is OptimizerSource.OBJECT else self.writes

    @property
    def holds_mean(self) -> bool:
        """Whether a loop may call `average` and `update`."""
        return self.uses("average") and not self.uses("next_step")

    def uses(self, call: str) -> bool:
        """Return whether a call has an effect on this part."""
        return getattr(type(self), call) is not getattr(WorkerPart, call)


class Logged(WorkerPart):
    """Base of a part with logged exchanges, below which workers regroup: all, or those of each group.

    Attributes:
        exchanger: object that carries out the exchanges.
        group: number of neighboring workers that also exchange among themselves; 0: none do.
        total: number of steps of every worker in the whole run, where groups regroup; None: not known.
    """

    exchanger: Exchanger[Any]
    group: int = 0
    total: int | None = None
    _flat: FlatParameters

    def start(self, step: int) -> int:
        """Begin with worker 0's parameters, or with those that were restored on every worker."""
        self.exchanger.since = self.since(step)
        self.begin_equal()
        self.exchanger.prepare()
        return step

    def since(self, step: int) -> int:
        """Return the number of steps done at the latest exchange before a step; default: there is one in each step."""
        return step

    def begin_equal(self) -> None:
        """Send worker 0's parameters to all workers, unless they were restored."""
        if not (self.restored and self.stores_parameters):
            self.initialize()  # if the broadcast fails, others receive worker 0's state
            self.exchanger.workers.broadcast(self._flat.vector)
            self.initialize()

    def initialize(self) -> None:
        """Begin at the parameters in the flat vector, which are the same on all workers."""

    @property
    def stores_parameters(self) -> bool:
        """Whether its parameters follow from its state."""
        return any(field.at == "_flat.vector" for field in self.fields)

    def to_enter_with(self) -> State:
        """Return the initial state, other than parameters and log, of a worker that joins with a copy of this one's."""
        return self.save_fields(self._common_fields())

    def enter(self, state: State, step: int) -> None:
        """Start with a copy of another worker's state; its parameters and log are copied already.

        Args:
            state: result of that worker's `to_enter_with`.
            step: number of steps done.
        """
        self.load_fields(self._common_fields(), state)

    def model_in(self, state: State) -> Tensor | None:
        first = self.fields[0]
        return state[0][first.name] if first.at == "_flat.vector" else None

    @classmethod
    def _common_fields(cls) -> list[StateField]:
        """Return the fields that are not each worker's own, without the parameters."""
        return [each for each in cls.fields if each.conversion.per == "run" and each.at != "_flat.vector"]

    def take_part(self, joins: int) -> None:
        """Take part in a pending exchange between two steps; called after `enter`, when the view is agreed.

        Args:
            joins: kind of the exchange; see `Entry.aside`.
        """
        if joins == MODELS:
            self.present()
        elif joins == NEWEST:
            self.catch_up()


_FORMER = (
    " BeginsEarly OverlapsBackward HoldsMeanGradient LazyUse SkipsSteps Presents CatchesUp UsesServers Background "
    "TakesLocalSteps HoldsModel HearsOfStop WorkerCalls "
)


def __getattr__(name: str) -> Any:
    """Refuse classes of version 0.1; `WorkerPart` has their calls."""
    if f" {name} " in _FORMER:
        raise ImportError(
            f"{name} is no longer needed: `WorkerPart` has all calls, override those that you need "
            "(docs/tutorials/own-strategy.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
