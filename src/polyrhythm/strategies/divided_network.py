"""Strategies that divide a network among workers, in addition to the calls of every strategy.

layers of one network, jointly      CutsNetwork        by output channels, rows or classes (`hybrid`)
stages, one after the other         ComputesStages     (`pipeline`); its strategy is a `HasStages`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from polyrhythm.partition.hybrid_pass import Loss
from polyrhythm.partition.ownership import Division
from polyrhythm.partition.pipeline_pass import Lap
from polyrhythm.strategies.worker_part import Step, WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes, PieceSize
from polyrhythm.training.optimizer_plan import OptimizerPlan

if TYPE_CHECKING:
    from polyrhythm.partition.outlook import Pace, PipelineForecast
    from polyrhythm.strategies.strategy import Strategy


class HasStages:
    """Base of a strategy with workers that hold stages of a network (`Traits.pipelines`)."""

    def check_network(self, model: nn.Module, flat: FlatParameters, image: Tensor, workers: int) -> None:
        """Check that a network can be cut for `workers` workers.

        Args:
            model: network on the CPU; not changed.
            flat: parameters of the network.
            image: zeros in the shape of an input image, (1, C, H, W).
            workers: number of workers.

        Raises:
            RequestError: it cannot; the message has the reason and the layer.
        """
        raise NotImplementedError

    @property
    def cuts_again(self) -> bool:
        """Whether the network may be cut differently when a run is resumed."""
        raise NotImplementedError

    @property
    def chooses_copies(self) -> bool:
        """Whether `with_copies` chooses the number of copies of the stages."""
        raise NotImplementedError

    def has_become(self, other: Strategy) -> bool:
        """Return whether another strategy is this one after its copies were chosen."""
        raise NotImplementedError

    def workers_of_ranks(self, workers: int) -> tuple[range, ...]:
        """Return, for each rank, the indices of the workers that hold copies of its stages, for `workers` workers."""
        raise NotImplementedError

    def with_copies(
        self,
        make_model: Callable[[], nn.Module],
        image_shape: tuple[int, int, int],
        workers: int,
        images: int,
        pace_of: Callable[[Sequence[range]], Pace] | None = None,
        measured: Callable[[int], Sequence[float]] | None = None,
    ) -> Strategy:
        """Return the strategy with an explicit number of copies of every stage, where it chooses them itself.

        Args:
            make_model: constructor of the network, with parameters or on the meta device (shapes only).
            image_shape: shape of an image, (C, H, W).
            workers: number of workers to distribute.
            images: images per step of all workers.
            pace_of: function that returns the speed of ranks from the workers of each; None: unknown, assumed equal.
            measured: function that returns the seconds of each piece of the network, for a microbatch size; None:
                pieces are compared by FLOP count.

        Raises:
            RequestError: the network cannot be cut this way.
        """
        raise NotImplementedError

    def settled(
        self,
        model: nn.Module,
        image: Tensor,
        workers: int,
        images: int,
        plan: OptimizerPlan,
        pace: Pace,
        room: Sequence[float],
    ) -> tuple[Strategy, PipelineForecast]:
        """Return the strategy with explicit cuts of the network, and a forecast of its run.

        Args:
            model: the network, with parameters or on the meta device (shapes only).
            image: input image, (1, C, H, W).
            workers: number of workers.
            images: images per step of one pipeline.
            plan: plan of the optimizer.
            pace: speeds of the ranks of a pipeline.
            room: memory of each rank in bytes; infinite where unknown.

        Raises:
            RequestError: the network cannot be cut this way, or a rank has too little memory for its stages.
        """
        raise NotImplementedError

    def sizes_of_parts(
        self, sizes: ModelSizes, model: nn.Module, image_shape: tuple[int, int, int], workers: int
    ) -> ModelSizes:
        """Return the sizes of a model and of the parts that it is cut into, for a dry run.

        Args:
            sizes: sizes of the whole model.
            model: model on the meta device.
            image_shape: shape of an image, (C, H, W).
            workers: number of workers.

        Raises:
            RequestError: the network cannot be cut this way.
        """
        raise NotImplementedError


class CutsNetwork(WorkerPart):
    """Base of a part that computes a network's last layers jointly with the others; see `Traits.cuts_network`."""

    def divide(self, division: Division) -> None:
        """Set which parameters of the network this worker owns; called before `load_state` and `start`."""
        raise NotImplementedError

    def compute(self, step: Step, images: Tensor, loss: Loss) -> float:
        """Compute the gradients of a step together with the others.

        Args:
            step: step that was given to `begin`.
            images: images, (B, C, H, W); B may be 0.
            loss: loss function of a subset of the images.

        Returns:
            The mean loss of the images; 0 without any.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SharedBatch:
    """A batch with gradients that several workers compute together.

    Attributes:
        images: images, (B, C, H, W); B may be 0.
        full: size B of a full batch.
        loss: loss function of a subset of the images.
        learning_rate: learning rate of the update.
        seed: function that seeds the random generators, from the numbers of a microbatch and of a layer.
        pass_time: function that advances virtual time by a fraction of this worker's step time, with a description of
            the activity.
        lap: function that records the activity that has just ended: its phase of the step, and its description.
    """

    images: Tensor
    full: int
    loss: Loss
    learning_rate: float
    seed: Callable[[int, int], None]
    pass_time: Callable[[float, str], None]
    lap: Callable[[Lap, str], None]


@dataclass(frozen=True)
class PipelineContext:
    """Run parameters that determine how a network is cut into stages.

    Attributes:
        images: images per step of all workers of a pipeline; 0: unknown.
        tested: largest number of images evaluated at once.
        saves: whether checkpoints are written.
        writes: whether the network is written at the end.
        room: memory limit of a rank in bytes; None: unknown.
        now: clock, where time is real; None: time is virtual.
    """

    images: int = 0
    tested: int = 0
    saves: bool = False
    writes: bool = False
    room: int | None = None
    now: Callable[[], float] | None = None


class ComputesStages(WorkerPart):
    """Base of a part that computes stages of a network and sends their outputs on; see `Traits.pipelines`.

    Attributes:
        outlook: forecast of the run, on rank 0; None: unknown.
    """

    outlook: PipelineForecast | None = None

    def take_network(self, model: nn.Module, image: Tensor, around: PipelineContext) -> None:
        """Set the network; its parameters are views of the flat vector. Called before `load_state` and `start`.

        Args:
            model: network on its device; on workers other than rank 0 it may be on the meta device (shapes only).
            image: zeros in the shape of an input image, (1, C, H, W), on the device.
            around: run parameters that determine the cut.

        Raises:
            RequestError: the network cannot be cut this way.
        """
        raise NotImplementedError

    def take_sizes(self, pieces: tuple[PieceSize, ...]) -> None:
        """Set the sizes of a network, for a dry run.

        Args:
            pieces: indivisible pieces of the network; none where only the number of its parameters is known.
        """
        raise NotImplementedError

    def compute_stages(self, step: Step, batch: SharedBatch) -> float:
        """Compute the gradients of a step together with the others.

        Args:
            step: step that was given to `begin`.
            batch: batch of all workers of the pipeline.

        Returns:
            The mean loss of the batch; 0 without any images.
        """
        raise NotImplementedError

    def compute_dry(
        self,
        step: Step,
        images: int,
        full: int,
        pass_time: Callable[[float, str], None],
        lap: Callable[[Lap, str], None],
    ) -> None:
        """Send and receive the messages of a step, and advance virtual time by its duration.

        Args:
            step: step that was given to `begin`.
            images: number of images of the batch that workers compute together.
            full: number of images of a full batch.
            pass_time: function as in `SharedBatch`.
            lap: function as in `SharedBatch`.
        """
        raise NotImplementedError
