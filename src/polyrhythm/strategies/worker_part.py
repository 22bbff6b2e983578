"""The worker's side of a strategy."""

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
