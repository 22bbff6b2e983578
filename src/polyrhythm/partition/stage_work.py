"""What one stage of a network computes of a microbatch: forward, backward, and again where activations are not kept.

    forward    leaves = values that came, detached ─▶ stage ─▶ outputs        kept: leaves and outputs
    backward   d outputs, that came ─▶ autograd ─▶ parameters' gradients, d leaves

With `recomputes`, only the leaves are kept, and the forward pass is run again before the backward pass, with the same
random numbers (Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174).

Loss of a batch of B pictures = sum over its microbatches m of n_m / B times their mean loss; gradients are added up in
the order of the backward passes, which ascends in all schedules. So they are bit for bit those of one rank that does
the same microbatches one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.errors import RunError
from polyrhythm.partition.chain import Chain, Cut, Stage
from polyrhythm.partition.deferred_statistics import DeferredStatistics
from polyrhythm.partition.deferred_weights import DeferredWeights
from polyrhythm.training.forward_pass import by_running_statistics


@dataclass
class Passing:
    """A microbatch that a stage has computed forward, and not yet backward.

    Attributes:
        leaves: the values that came, with their gradients later.
        outputs: what the stage made of them; empty where it will be made again.
        share: of its batch's loss, in the last stage.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]
    share: float = 0.0


@dataclass(frozen=True)
class Microbatch:
    """What a stage must know of a microbatch.

    Attributes:
        images: (n, C, H, W).
        rows: n.
        loss: maps logits (n, classes) to their mean loss, ().
        share: of its batch's mean loss that is its own: n / B.
        scale: of its gradients: the same, or 1 where an update follows it.
        seed: fixes what an operation draws, from its place in the network.
        position: in its batch.
    """

    images: Tensor
    rows: int
    loss: Callable[[Tensor], Tensor]
    share: float
    scale: float
    seed: Callable[[int], None]
    position: int


@dataclass
class NetworkStage:
    """A stage of a network on this rank; see `StageWork`.

    Args:
        chain: the network.
        stage: of it.
        share: of the whole network's time.
        microbatch: returns what is to be known of one, from its number.
        like: a tensor with the dtype and device of values.
        recomputes: whether activations are computed again in place of being kept.
        splits: whether gradients of weights are left to `weights`.
        statistics: of batch normalisation in this stage; None: each microbatch changes them.
        using: makes the stage compute with the weights of a microbatch; none where there are no versions.
    """

    chain: Chain
    stage: Stage
    share: float
    microbatch: Callable[[int], Microbatch]
    like: Tensor
    recomputes: bool = False
    splits: bool = False
    statistics: DeferredStatistics | None = None
    using: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext()
    _passing: dict[int, Passing] = field(default_factory=dict)
    _deferred: dict[int, DeferredWeights] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """How many values come from the stage before."""
        return 0 if self.stage.before is None else len(self.stage.before.values)

    @property
    def outputs(self) -> int:
        """How many values go to the next stage."""
        return 0 if self.stage.after is None else len(self.stage.after.values)

    def take(self, number: int, message: Message, position: int) -> Tensor:
        """Return a value that has come.

        Raises:
            RunError: it has another size or dtype.
        """
        assert self.stage.before is not None, "the first stage takes pictures"
        return self._shaped(number, message, self.stage.before, position).requires_grad_()

    def take_gradient(self, number: int, message: Message, position: int) -> Tensor:
        """Return the gradient of a value that has been sent.

        Raises:
            RunError: it has another size or dtype.
        """
        assert self.stage.after is not None, "the last stage has a loss"
        return self._shaped(number, message, self.stage.after, position)

    def forward(self, number: int, values: list[Tensor]) -> list[Tensor]:
        """Compute forward; return what goes to the next stage, flat."""
        micro = self.microbatch(number)
        leaves = values if self.stage.before is not None else [micro.images]
        if micro.rows == 0:
            self._passing[number] = Passing(leaves, [])
            return [self.like.new_zeros(0)] * self.outputs
        with self.using(number):
            if self.statistics is not None:
                self.statistics.begin(micro.position)
            outputs = self._computed(number, micro, leaves)
            if self.statistics is not None:
                self.statistics.end()
        passing = self._passing[number] = Passing(leaves, outputs)
        if self.stage.after is None:
            value = micro.loss(outputs[0])
            passing.outputs, passing.share = (
                [_scaled(value, micro.scale)],
                float(value.detach()) * micro.share,
            )
            outputs = []
        if self.recomputes:
            passing.outputs = []
            self._deferred.pop(number, None)
        return [value.detach().reshape(-1) for value in outputs]

    def loss(self, number: int) -> float:
        """Return a microbatch's share of the mean loss of its batch."""
        return self._passing[number].share

    def backward(self, number: int, gradients: list[Tensor]) -> list[Tensor]:
        """Compute backward; return the gradients of the values that came, flat."""
        micro = self.microbatch(number)
        passing = self._passing.pop(number)
        if micro.rows == 0:
            return [self.like.new_zeros(0)] * self.inputs
        with self.using(number):
            if self.recomputes:
                if self.statistics is not None:
                    self.statistics.begin(None)
                passing.outputs = self._computed(number, micro, passing.leaves)
                if self.statistics is not None:
                    self.statistics.end()
                if self.stage.after is None:
                    passing.outputs = [_scaled(micro.loss(passing.outputs[0]), micro.scale)]
            given: list[Tensor | None] = [*gradients] or [None]
            trained = [
                (value, gradient)
                for value, gradient in zip(passing.outputs, given, strict=True)
                if value.requires_grad
            ]
            if trained:
                torch.autograd.backward(
                    [value for value, _ in trained], [gradient for _, gradient in trained]
                )
        if self.stage.before is None:
            return []
        return [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).reshape(-1)
            for leaf in passing.leaves
        ]

    def weights(self, number: int) -> None:
        """Add the gradients of weights that `backward` has left."""
        deferred = self._deferred.pop(number, None)
        if deferred is not None:
            deferred.finish()

    def _computed(self, number: int, micro: Microbatch, leaves: list[Tensor]) -> list[Tensor]:
        deferred: AbstractContextManager[Any] = nullcontext()
        if self.splits:
            deferred = self._deferred[number] = DeferredWeights()
        alone = by_running_statistics(self.stage.module) if micro.rows == 1 else nullcontext()
        self.chain.seed = micro.seed
        try:
            with torch.enable_grad(), deferred, alone:
                return list(self.stage.module(*leaves))
        finally:
            self.chain.seed = None

    def _shaped(self, number: int, message: Message, cut: Cut, position: int) -> Tensor:
        rows, shape = self.microbatch(number).rows, cut.shapes[position]
        vector = message.tensor
        expected = rows * torch.Size(shape).numel()
        if vector is None or vector.dtype != self.like.dtype or vector.numel() != expected:
            raise RunError(
                f"what came for microbatch {number} does not fit: {expected} numbers of {self.like.dtype} were "
                "expected; all workers must train the same network"
            )
        return vector.to(self.like.device).view(rows, *shape)


def _scaled(value: Tensor, scale: float) -> Tensor:
    return value if scale == 1.0 else value * scale
