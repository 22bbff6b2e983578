"""The worker's side of a strategy: the calls that a training loop makes around the forward and backward pass.

`WorkerSetting` is what a worker part is built from, `Step` describes one of its gradients, and `Regrouping`
declares the calls by which a worker continues in another group after a worker is lost or joins.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.hybrid_pass import Loss
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


@dataclass(slots=True)
class Step:
    """One gradient of one worker, known before it is computed.

    Nobody changes it; a frozen one takes four times as long to make, and every step makes one.

    Attributes:
        number: the worker's steps before this one.
        weight: samples that the gradient is the mean of, in units of a full batch; 0 for an empty batch.
        stop: whether this worker has been asked to stop.
    """

    number: int
    weight: float = 1.0
    stop: bool = False


@dataclass(frozen=True)
class WorkerSetting:
    """What a worker part works with.

    Attributes:
        network: all ranks of the run.
        workers: the workers only; `workers.rank` is this worker's index.
        cast: which ranks of `network` do what.
        flat: the model's parameters and gradients.
        plan: the user's optimiser.
        steps: that every worker takes in the whole run; None where nobody can tell (a user's own loop).
        head: in a rehearsal of a strategy that cuts the network, `ModelSizes.head`.
        batch_size: of a step of weight 1, in a rehearsal.
        succeeds: whether this worker is the successor of one that was lost, and the servers have all they need.
        incarnation: how many have had this worker's rank before it.
        leader_returns: whether worker 0 gets a successor when it is lost.
    """

    network: Communicator
    workers: Communicator
    cast: RoleAssignment
    flat: FlatParameters
    plan: OptimizerPlan
    steps: int | None = None
    head: tuple[int, ...] = ()
    batch_size: int = 0
    succeeds: bool = False
    incarnation: int = 0
    leader_returns: bool = False


class Reassembled(NamedTuple):
    """How a member of a group goes on after somebody of it was lost, or came.

    Attributes:
        step: steps that all of the group have done now.
        over: whether nothing is left but to leave.
        there: the group's workers that are there, by their indices, in their order.
        absent: those of the group that are not.
        round: how many times the group has regrouped.
    """

    step: int
    over: bool
    there: tuple[int, ...]
    absent: tuple[int, ...]
    round: int


class Regrouping:
    """What a worker part is asked where workers are lost and come, and says of how far it is with the others.

    Somebody is lost or comes: all break off what is under way, and agree on where the others go on.

        break_off ─▶ begun_again ─▶ meetings ─▶ ( take_over, if behind ) ─▶ regroup

    A group in which workers regroup among themselves (`regroups_apart`) does all of it in `reassemble`.
    """

    def break_off(self) -> None:
        """The workers' communicator has been revoked: gives up whatever is under way on it.

        Afterwards nothing of that touches the flat vector or the gradients any more.
        """

    def begun_again(self, step: int) -> int:
        """Says with how many steps done this worker goes on after `break_off`; fewer, if the latest was not whole.

        Args:
            step: that it had done.
        """
        return step

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Goes on with other workers than before, where the strategy `regroups`; a successor begins with it.

        All members have met equally often: those who had less often have been given another's flat vector and `state`
        (`take_over`). Gradients are zero, in new memory, and nothing is under way. A step that broke is begun again.

        Args:
            workers: those that go in step from now on; all of them are told at the same place.
            members: their indices among all workers of the run, in the same order; worker 0 is always there.

        Raises:
            PeerLost: another is lost meanwhile; then it is called again, after `break_off`.
        """
        raise NotImplementedError

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let into this worker's group, where the strategy `regroups_apart`."""
        return False

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Goes on with those of this worker's group who are there, where the strategy `regroups_apart`.

        What was under way in the group is given up, and a step that servers have not taken is begun again by all.

        Args:
            enters: whether this worker is a successor, which has not been in the group.

        Raises:
            PeerLost: another of the group is lost meanwhile, and then it is called again; or a server is.
        """
        raise NotImplementedError

    def meetings(self, step: int) -> int:
        """Says how many times all workers have met, none going on before all had come, in so many steps.

        Who has met less often than another is behind it; others need not have done equally many steps to regroup.

        Args:
            step: steps done.
        """
        return step

    def exchanges(self, step: int) -> int:
        """Says how many times others have been given what this worker has learned, in so many steps.

        What a lost worker did since the last time is gone. Default: at every meeting.

        Args:
            step: steps done.
        """
        return self.meetings(step)

    def lets_in(self, step: int) -> bool:
        """Whether a step may be broken off, before it begins, to let a worker in; default: one with a meeting.

        Args:
            step: its number.
        """
        return self.meetings(step + 1) > self.meetings(step)

    @property
    def has_stopped(self) -> bool:
        """Whether others have stopped where this worker is, as it has heard in regrouping or as it came."""
        return False


class WorkerPart(Regrouping):
    """What a strategy does on one worker.

    The training loop calls it in this order:

        start ─▶ ( begin ─▶ before_use(b)… forward ─▶ bucket_ready(b)… backward ─▶ gradients_ready )…
              ─▶ settle ─▶ present ─▶ catch_up ─▶ ( … )… ─▶ settle ─▶ end ─▶ let_go ─▶ close

    Attributes:
        staleness: how many gradients were applied at which staleness, where the worker knows it.
        replicated: whether `state` is the same on all workers, so that one copy of it is enough.
        uses_bucket_ready: whether it makes use of `bucket_ready`; a loop may still not call that.
        uses_before_use: whether it needs `before_use`, which a loop must then call, after `begin`.
    """

    replicated: ClassVar[bool] = False
    uses_bucket_ready: ClassVar[bool] = False
    uses_before_use: ClassVar[bool] = False

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()

    def start(self, step: int) -> int:
        """Agrees with the others on the parameters to start from.

        Args:
            step: where this worker would start (0, or what a checkpoint says).

        Returns:
            Where it must start: a server may know better than a checkpoint which gradients have been applied.
        """
        raise NotImplementedError

    def begin(self, step: Step) -> None:
        """Called before anything of a step is computed."""

    def before_use(self, bucket: int) -> None:
        """Called before a layer with parameters of this bucket runs forward."""

    def take_parts(self, parts: Cut) -> None:
        """Takes the network in two parts, where the strategy `cuts_network`; called before `load_state` and `start`."""
        raise NotImplementedError

    def compute(self, step: Step, images: Tensor, loss: Loss) -> float:
        """Computes the gradients of a step together with the others, where the strategy `cuts_network`.

        Args:
            step: as it was given to `begin`.
            images: (B, C, H, W); maybe none.
            loss: of some of them.

        Returns:
            Their mean loss; 0 without any.
        """
        raise NotImplementedError

    def bucket_ready(self, bucket: int) -> None:
        """Called when the gradients of this bucket are final, during the backward pass; buckets come in order."""

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Exchanges the gradients, which are final now, and updates the parameters.

        Afterwards the loop zeroes the gradients; a part that sends them later sends a copy.

        Args:
            step: as it was given to `begin`; may weigh less if no bucket has been announced.
            learning_rate: the one to update with.

        Returns:
            Whether this worker must stop after this step, because a rank was asked to. Where workers go in step, all
            get the same answer at the same step.
        """
        raise NotImplementedError

    def next_step(self, step: int) -> int:
        """Gives the step that follows a completed one: not always the next, where the others did not wait.

        Asked after every step. This worker skips the steps between; a user's own loop, which cannot skip, computes them
        in vain.
        """
        return step + 1

    def settle(self) -> None:
        """Completes pending exchanges and updates, so that the flat vector holds this worker's current model."""

    def check_servers(self) -> None:
        """Checks which servers were lost since they were last asked, so that their successors are asked."""

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Takes over the state of the newest worker, where this one is behind; its flat vector is copied already.

        Args:
            newest: the result of `state` there.
            done: steps that this worker has done; negative for a successor that has just come.
            step: steps that the newest worker has done.

        Returns:
            Steps that this worker has done now.
        """
        self.load_state(newest)
        return step

    def common_model(self) -> Tensor:
        """Gives the mean of all workers' models, `(size,)`, where the strategy `can_begin_anew`; called on all."""
        raise NotImplementedError

    def begin_at(self, vector: Tensor) -> None:
        """Continues from another point, the same on all workers, where the strategy `can_begin_anew`.

        Args:
            vector: `(size,)`, the same bits on all; copied.
        """
        raise NotImplementedError

    def present(self) -> Tensor | None:
        """Called after an epoch: gives the model to be tested, where it is not worker 0's own.

        Called on every worker after every epoch but the last, after which `end` leaves the model in the flat vector.
        Training goes on from the flat vector as it is.

        Returns:
            `(size,)`, the run's model as it is now (a centre, a mean); None for that of worker 0.
        """
        return None

    def catch_up(self) -> None:
        """Called after an epoch: takes over what others did while this worker was evaluating.

        Called on every worker after every epoch but the last.
        """

    def end(self) -> None:
        """Leaves the other workers.

        On worker 0 the flat vector then holds the run's final parameters, at the latest after `let_go`.
        """

    def let_go(self) -> None:
        """Lets the servers go, when all workers have left. Called on worker 0 only."""

    def close(self) -> None:
        """Ends what this worker does in the background. Called last, when no rank needs it any more."""

    def state(self) -> State:
        """Gives what a resumed worker needs beside the parameters."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; called before `start`."""

    def model_in(self, state: State) -> Tensor | None:
        """Gives the model, `(size,)`, that a worker held when `state` gave this; None where its part does not hold it.

        Args:
            state: of any worker.
        """
        return None
