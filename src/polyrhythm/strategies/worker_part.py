"""The worker's side of a strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.hybrid_pass import Loss
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan


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
        still: whether parameters and gradients are zeros that nothing changes, as in a rehearsal.
        head: in a rehearsal of a strategy that cuts the network, `ModelSizes.head`.
        batch_size: of a step of weight 1, in a rehearsal.
        succeeds: whether this worker is the successor of one that was lost, and the servers have all they need.
        incarnation: how many have had this worker's rank before it.
        leader_returns: whether worker 0 gets a successor when it is lost.
    """

    network: Communicator
    workers: Communicator
    cast: Cast
    flat: FlatParameters
    plan: OptimizerPlan
    steps: int | None = None
    still: bool = False
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


class WorkerPart:
    """The worker's side.

    The training loop calls it in this order:

        start ─▶ ( begin ─▶ before_use(b)… forward ─▶ bucket_ready(b)… backward ─▶ gradients_ready )…
              ─▶ settle ─▶ present ─▶ catch_up ─▶ ( … )… ─▶ settle ─▶ end ─▶ let_go ─▶ close

    Attributes:
        staleness: how many gradients were applied at which staleness, where this side knows it.
        replicated: whether `state` is the same on all workers, so that one copy of it is enough.
        hears_buckets: whether it wants `bucket_ready`; even then a loop may leave it out.
        hears_use: whether it wants `before_use`; then it must be called, and `begin` with it.
    """

    replicated: ClassVar[bool] = False
    hears_buckets: ClassVar[bool] = False
    hears_use: ClassVar[bool] = False

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
        """A step begins. Nothing of it has been computed."""

    def before_use(self, bucket: int) -> None:
        """A layer with parameters of this bucket is about to run forward."""

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
        """The gradients of this bucket are final, while the backward pass goes on. Buckets come in order."""

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """All gradients are final: exchange and update.

        Afterwards the loop zeroes the gradients; a part that sends them later sends a copy.

        Args:
            step: as it was given to `begin`; may weigh less if no bucket has been announced.
            learning_rate: the one to update with.

        Returns:
            Whether this worker must stop after this step, because someone was asked to. Where workers go in step,
            all get the same answer at the same step.
        """
        raise NotImplementedError

    def next_step(self, step: int) -> int:
        """Says which step comes after one that is over: not always the next, where the others did not wait.

        Asked after every step. Steps that are left out are over for this worker; a user's own loop, which cannot skip,
        computes them for nothing.
        """
        return step + 1

    def settle(self) -> None:
        """Finishes what is under way, so that the flat vector holds this worker's current model."""

    def hear_of_servers(self) -> None:
        """Takes note of servers that were lost while nothing was asked of them, so that their successors can be."""

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
        """Whether others have stopped where this worker is, as it has heard in regrouping: it takes no step more."""
        return False

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Takes what the newest worker holds, where this one is behind it; its flat vector has been copied already.

        Args:
            newest: what `state` gives there.
            done: steps that this worker has done; negative: it has just come.
            step: steps that the newest has done.

        Returns:
            Steps that this worker has done now.
        """
        self.load_state(newest)
        return step

    def common_model(self) -> Tensor:
        """Gives the mean of all workers' models, `(size,)`, where the strategy `can_begin_anew`; all ask together."""
        raise NotImplementedError

    def begin_at(self, vector: Tensor) -> None:
        """All workers begin anew at the same point, where the strategy `can_begin_anew`; nothing is under way.

        Args:
            vector: `(size,)`, the same bits on all; copied.
        """
        raise NotImplementedError

    def present(self) -> Tensor | None:
        """An epoch is over: gives the model to be tested, where it is not worker 0's own.

        Every worker is asked after every epoch but the last; after that, `end` leaves the model in the flat vector.
        Training goes on from the flat vector as it is.

        Returns:
            `(size,)`, the run's model as it is now (a centre, a mean); None for that of worker 0.
        """
        return None

    def catch_up(self) -> None:
        """An epoch is over, and this worker may have been away to evaluate: takes what others did meanwhile.

        Every worker is told after every epoch but the last.
        """

    def end(self) -> None:
        """Leaves. On worker 0 the flat vector then holds the run's final parameters."""

    def let_go(self) -> None:
        """All workers have left: lets the servers go. Called on worker 0 only."""

    def close(self) -> None:
        """Nobody will need this worker again: ends what it does in the background. Last of all."""

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
