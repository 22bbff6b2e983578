"""Common base of optimizers that use all workers' data, and not their mean gradient alone.

Others see parameters and a gradient. These also see the network's outputs and each worker's own gradient,
and exchange what they have found with the other workers before they move anything:

    begin ─▶ ( forward ─▶ observe ─▶ backward )… ─▶ note_own ─▶ gradients are averaged ─▶ update: exchange ─▶ move

All communication of `update` precedes any change of the optimizer. So a step that broke since a
worker was lost is repeated without side effects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError
from polyrhythm.training.flat_optimizer import Packed, pack_optimizer_state, unpack_optimizer_state
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer import OptimizerConfig


class Workers(Protocol):
    """The workers with data that count: a subset of `Communicator`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Add `tensor` up over all workers, in place, to the same bits everywhere."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrite `tensor` with `root`'s."""


class OneWorker:
    """A worker without others."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Leave the tensor as it is."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over a batch, or over a piece of one.

    Attributes:
        images: number of images.
        scores: function that recomputes the network's outputs, (B, K) or (B, R, K), with the same random numbers.
        loss: function that returns the mean loss of outputs, ().
    """

    images: int
    scores: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]


def _no_time(share: float) -> None:
    """Let no time pass: that of a real run passes by itself."""


class JointOptimizer(torch.optim.Optimizer):
    """An optimizer that looks at all workers' data.

    Args:
        params: parameters, or groups of them, as for every `torch.optim` optimizer.
        options: options of all groups without their own.

    Attributes:
        options: all options, with their defaults.
        observes: whether it is shown forward passes.
        compares: whether it needs each worker's own gradient.
        workers: workers with data that count.
        pass_time: function that advances virtual time by a share of a worker's step time.
    """

    options: ClassVar[dict[str, Any]]
    observes: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, {**self.options, **options})
        self.workers: Workers = OneWorker()
        self.pass_time: Callable[[float], None] = _no_time

    def tie(self, model: nn.Module) -> None:
        """Attach the network with its parameters; called once, before the first step."""

    @abstractmethod
    def begin(self, number: int, seed: int) -> None:
        """Begin a step, or begin it again: forget what was observed.

        Args:
            number: number of the step, the same on all workers.
            seed: seed of what is drawn in it.
        """

    def observe(self, scores: Tensor, batch: Pass) -> None:
        """Observe a forward pass, before its backward pass; leaves gradients and graph as they are.

        Args:
            scores: outputs of the network, (B, K) or (B, R, K).
            batch: forward pass, which can recompute the scores.
        """

    def note_own(self, gradients: Tensor, images: int) -> None:
        """Store this worker's mean gradient, `(n,)`, over `images` images, before it is averaged; if it `compares`."""

    @abstractmethod
    def update(self, flat: FlatParameters, rate: float) -> None:
        """Take a step.

        Nothing is exchanged inside `no_grad` and the like: simulated workers share these states, and take turns.

        Args:
            flat: the parameters, changed in place, and their mean gradients over all workers, not changed.
            rate: learning rate of the first number of the vector, to which all others keep their ratio.

        Raises:
            PeerLost: a worker is lost; nothing has changed.
        """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Refuse: a gradient alone is not enough."""
        raise RequestError(
            f"{type(self).__name__} needs all workers' data: train with --strategy synchronous"
        )


class Joint(OptimizerConfig):
    """Keys of an optimizer that looks at all workers' data.

    Attributes:
        follows_network: whether it looks at what the layers of the network compute.
        any_precision: whether passes may then be of mixed precision (bfloat16).
    """

    follows_network: ClassVar[bool] = True
    any_precision: ClassVar[bool] = True


class SteppedOnModel:
    """A `JointOptimizer` as the owner of a model's whole vector steps it.

    Args:
        optimizer: optimizer over the model's parameters.
        flat: flat parameters of the model.

    Attributes:
        inner: the optimizer.
    """

    def __init__(self, optimizer: JointOptimizer, flat: FlatParameters) -> None:
        self.inner = optimizer
        self._flat = flat

    def over(self, workers: Workers) -> None:
        """Exchange with these workers from now on."""
        self.inner.workers = workers

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Update the flat vector; see `JointOptimizer.update`.

        Args:
            gradient: the flat gradients.
            learning_rate: learning rate of the vector's first number.
        """
        assert gradient is self._flat.gradients, "gradients are those of the model"
        self.inner.update(self._flat, learning_rate)

    def state(self) -> Packed:
        """Return all that a resumed optimizer needs, as named tensors and JSON-able facts."""
        return pack_optimizer_state(self.inner)

    def load_state(self, state: Packed) -> None:
        """Load what `state` returned."""
        unpack_optimizer_state(self.inner, *state)


def averaged(workers: Workers, parts: list[Tensor], images: int) -> tuple[list[Tensor], float]:
    """Return sums over workers' images, divided by how many there are, and that number; all workers call it.

    Args:
        workers: workers that add their sums.
        parts: own sums, of one dtype; not changed.
        images: images of this worker.
    """
    whole = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_tensor([images])])
    workers.all_reduce(whole)
    count = float(whole[-1])
    shapes = [part.shape for part in parts]
    pieces = whole[:-1].split([shape.numel() for shape in shapes])
    found = [piece.view(shape) / max(count, 1.0) for piece, shape in zip(pieces, shapes, strict=True)]
    return found, count


@contextmanager
def same_random_numbers(state: Tensor, device: torch.device) -> Iterator[None]:
    """Draw from the earlier state of torch's generator of a device; the present state is restored."""
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.default_generator.set_state(state)
        yield


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator of a device, for `same_random_numbers`."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()
