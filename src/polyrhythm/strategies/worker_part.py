"""The worker's side of a strategy: the calls that a training loop makes around the forward and backward pass."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from torch import Tensor

from polyrhythm.partition.cut import Cut
from polyrhythm.partition.hybrid_pass import Loss
from polyrhythm.strategies.regrouping import Regrouping
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step


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
