"""A stage of a network that is cut into a pipeline: its bounds, and its computation of a microbatch.

    cuts       piece 0 … c_1 - 1 | c_1 … c_2 - 1 | …        bounds: 0, c_1, c_2, …, number of pieces
    forward    leaves = received values, detached ─▶ stage ─▶ outputs        kept: leaves and outputs
    backward   received d outputs ─▶ autograd ─▶ parameters' gradients, d leaves
    in two     y = f(x, W)    B:  dx = df/dx' dy    W:  dW += df/dW' dy        of fully connected and convolution layers

Stages begin at given layers (`given`), or so that the slowest takes as little time as it can (`balanced`), by the
operations of its pieces.

With `recomputes`, only the leaves are kept, and the forward pass is run again before the backward pass, with the same
random numbers (Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174).

Loss of a batch of B images = sum over its microbatches m of n_m / B times their mean loss; gradients are added up in
the order of the backward passes, which ascends in all schedules. So they are bit for bit those of one rank that does
the same microbatches one after the other.

`DeferredWeights` leaves the gradients of weights for later: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism",
ICLR 2024, arXiv 2401.10241. What other layers have by way of weights, such as the scales of a norm, is little, and
computed with their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyrhythm.communication.message import Message
from polyrhythm.errors import RequestError, RunError
from polyrhythm.partition.chain import Chain, Cut, Stage
from polyrhythm.partition.deferred_statistics import DeferredStatistics
from polyrhythm.training.forward_pass import by_running_statistics
from polyrhythm.training.model_sizes import PieceSize

Bounds = tuple[int, ...]
"""The first piece of every stage, and at the end the number of pieces."""


def check_stages(pieces: Sequence[PieceSize], stages: int, where: str) -> None:
    """Refuse more stages than there are pieces.

    Raises:
        RequestError: there are.
    """
    if stages > len(pieces):
        names = ", ".join(piece.name for piece in pieces[:8]) + (", …" if len(pieces) > 8 else "")
        raise RequestError(
            f"{where} asks for {stages} stages, and the network can be cut into {len(pieces)} pieces at most "
            f"({names}): ask for fewer stages"
        )


def given(pieces: Sequence[PieceSize], layers: Sequence[str], stages: int, where: str) -> Bounds:
    """Return the bounds of stages that begin behind given layers.

    Args:
        pieces: pieces of the network.
        layers: names of the last layers of all stages but the last.
        stages: number of stages.
        where: name of the strategy, for messages.

    Raises:
        RequestError: a layer is none, or cannot be cut behind; or they are too few or too many.
    """
    if len(layers) != stages - 1:
        raise RequestError(
            f"{where} cuts behind {len(layers)} layers, which makes {len(layers) + 1} stages of {stages}: name "
            f"{stages - 1} layers"
        )
    bounds = [0]
    for layer in layers:
        behind = [
            number + 1
            for number, piece in enumerate(pieces[:-1])
            if piece.name == layer or piece.name.startswith((f"{layer}.", f"{layer}#"))
        ]
        if not behind:
            names = ", ".join(piece.name for piece in pieces[:-1])
            raise RequestError(
                f"{where}: the network cannot be cut behind {layer!r:.80}; it can behind {names:.400}"
            )
        bounds.append(behind[-1])
    if bounds != sorted(set(bounds)):
        raise RequestError(f"{where}: the layers to cut behind must be in the network's order")
    return (*bounds, len(pieces))


def balanced(pieces: Sequence[PieceSize], stages: int, copies: Sequence[int] = ()) -> Bounds:
    """Return bounds that minimize the time of the slowest of `stages` stages; ties go to fewer values sent.

    Args:
        pieces: pieces of the network; at least as many as stages.
        stages: number of stages.
        copies: copies of every stage, among which its time is shared; empty: one each.
    """
    count, copies = len(pieces), copies or (1,) * stages
    times = shares(pieces)
    sums = [0.0, *accumulate(times)]
    # best[n]: for the first n pieces in as many stages as have been made: (slowest, values sent, first piece of last)
    best: list[tuple[float, int, Bounds] | None] = [
        (sums[stop] / copies[0], 0, (0, stop)) if stop else None for stop in range(count + 1)
    ]
    for stage in range(1, stages):
        following: list[tuple[float, int, Bounds] | None] = [None] * (count + 1)
        for stop in range(stage + 1, count + 1):
            found: tuple[float, int, Bounds] | None = None
            for start in range(stage, stop):
                before = best[start]
                if before is None:
                    continue
                slowest = max(before[0], (sums[stop] - sums[start]) / copies[stage])
                sent = before[1] + sum(pieces[start - 1].outputs)
                if found is None or (slowest, sent) < found[:2]:
                    found = slowest, sent, (*before[2], stop)
            following[stop] = found
        best = following
    whole = best[count]
    assert whole is not None, "there are as many pieces as stages"
    return whole[2]


def shares(pieces: Sequence[PieceSize]) -> tuple[float, ...]:
    """Return each piece's share of the network's time: that of its operations; of its parameters, if none counts."""
    for weights in ([piece.operations for piece in pieces], [float(piece.parameters) for piece in pieces]):
        if sum(weights) > 0:
            return tuple(weight / sum(weights) for weight in weights)
    return tuple(1 / len(pieces) for _ in pieces)


def share_of_stages(pieces: Sequence[PieceSize], bounds: Bounds) -> tuple[float, ...]:
    """Return each stage's share of the network's time."""
    found = shares(pieces)
    return tuple(sum(found[start:stop]) for start, stop in pairwise(bounds))


Finish = Callable[[], None]


class DeferredWeights(TorchFunctionMode):
    """Inside, layers are computed such that their backward pass leaves the gradients of weights to `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[Finish] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if not (_is_trained(*args[1:2]) and not options):
            return func(*args, **options)
        if func is functional.linear:
            return _layer(_Linear, *args[:2], args[2] if len(args) > 2 else None, self._left)
        if func in (torch.conv1d, torch.conv2d, torch.conv3d):
            given = [*args, *_DEFAULTS[len(args) - 2 :]]
            sizes = [_sizes(each, args[1].ndim - 2) for each in given[3:6]]
            if all(sizes):
                return _layer(_Convolution, *given[:3], sizes, given[6], self._left)
        return func(*args, **options)

    def finish(self) -> None:
        """Add the gradients of weights that were left."""
        with torch.no_grad():
            for add in self._left:
                add()
        self._left.clear()


_DEFAULTS = (None, 1, 0, 1, 1)
"""Bias, stride, padding, dilation and groups of a convolution."""


def _is_trained(*weights: Any) -> bool:
    return (
        bool(weights) and isinstance(weights[0], Tensor) and weights[0].is_leaf and weights[0].requires_grad
    )


def _sizes(size: Any, dimensions: int) -> list[int]:
    """Return a size for each dimension; none where it is given as a word."""
    if isinstance(size, str):
        return []
    return [size] * dimensions if isinstance(size, int) else list(size)


def _layer(kind: Any, *arguments: Any) -> Any:
    return kind.apply(*arguments)


def _add(parameter: Tensor | None, gradient: Tensor | None) -> None:
    if parameter is None or gradient is None or not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: list[Finish]) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.left = left
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors

        def finish() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            _add(weight, rows.t().mm(x.reshape(-1, x.shape[-1])))
            _add(bias, rows.sum(0))

        ctx.left.append(finish)
        inputs = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        return inputs, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sizes: list[list[int]],
        groups: int,
        left: list[Finish],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how = (*sizes, False, [0] * (weight.ndim - 2), groups)
        ctx.left = left
        stride, padding, dilation = sizes
        outputs: Tensor = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, *ctx.how[3:])
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        biases = None if bias is None else list(bias.shape)
        how = ctx.how

        def part(mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(gradient, x, weight, biases, *how, mask)

        def finish() -> None:
            _, of_weight, of_bias = part(
                [False, weight.requires_grad, bias is not None and bias.requires_grad]
            )
            _add(weight, of_weight)
            _add(bias, of_bias)

        ctx.left.append(finish)
        inputs = part([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return inputs, None, None, None, None, None


@dataclass
class Passing:
    """A microbatch that a stage has computed forward, and not yet backward.

    Attributes:
        leaves: received values, with their gradients later.
        outputs: outputs of the stage; empty where they will be recomputed.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True)
class Microbatch:
    """Facts about a microbatch that a stage needs.

    Attributes:
        images: images, (n, C, H, W).
        rows: number of images, n.
        loss: function from logits, (n, classes), to their mean loss, ().
        share: share of its batch's mean loss that is its own: n / B.
        scale: scale of its gradients: the same, or 1 where an update follows it.
        seed: function that seeds the random numbers of an operation, given its place in the network.
        position: position in its batch.
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
        stage: stage of it.
        share: share of the whole network's time.
        microbatch: function of a microbatch's number that returns its facts.
        like: a tensor with the dtype and device of values.
        recomputes: whether activations are computed again in place of being kept.
        splits: whether gradients of weights are computed separately, by `weights`.
        together: whether all microbatches of a batch are computed at once, as one.
        statistics: statistics of batch normalization in this stage; None: each microbatch changes them.
        using: function that makes the stage compute with the weights of a microbatch; None without versions.
    """

    chain: Chain
    stage: Stage
    share: float
    microbatch: Callable[[int], Microbatch]
    like: Tensor
    recomputes: bool = False
    splits: bool = False
    together: bool = False
    statistics: DeferredStatistics | None = None
    using: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext()
    _passing: dict[int, Passing] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)
    _deferred: dict[int, DeferredWeights] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """Number of values received from the stage before."""
        return 0 if self.stage.before is None else len(self.stage.before.values)

    @property
    def outputs(self) -> int:
        """Number of values sent to the next stage."""
        return 0 if self.stage.after is None else len(self.stage.after.values)

    def take(self, number: int, message: Message, position: int) -> Tensor:
        """Return a received value.

        Raises:
            RunError: it has another size or dtype.
        """
        assert self.stage.before is not None, "the first stage takes images"
        return self._shaped(number, message, self.stage.before, position).requires_grad_()

    def take_gradient(self, number: int, message: Message, position: int) -> Tensor:
        """Return the gradient of a value that has been sent.

        Raises:
            RunError: it has another size or dtype.
        """
        assert self.stage.after is not None, "the last stage has a loss"
        return self._shaped(number, message, self.stage.after, position)

    def forward(self, numbers: Sequence[int], values: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Compute forward; return what goes to the next stage, flat, of each microbatch."""
        micros = [self.microbatch(number) for number in numbers]
        key, first, rows = numbers[0], micros[0], [micro.rows for micro in micros]
        leaves = list(values[0]) if self.stage.before is not None else [first.images]
        if not sum(rows):
            self._passing[key] = Passing(leaves, [])
            self._shares[key] = 0.0
            return [[self.like.new_zeros(0)] * self.outputs]
        if len(micros) > 1:
            leaves = [torch.cat([micro.images for micro in micros])]
            if self.stage.before is not None:
                leaves = [torch.cat(parts).detach().requires_grad_() for parts in zip(*values, strict=True)]
        with self.using(key):
            if self.statistics is not None:
                self.statistics.begin(first.position)
            outputs = self._computed(key, sum(rows), first, leaves)
            if self.statistics is not None:
                self.statistics.end()
        passing = self._passing[key] = Passing(leaves, outputs)
        if self.stage.after is None:
            passing.outputs = [self._loss(numbers, micros, outputs[0])]
            outputs = []
        if self.recomputes:
            passing.outputs = []
            self._deferred.pop(key, None)
        if not outputs:
            return [[] for _ in numbers]
        parts = [value.detach().split(rows) for value in outputs]
        return [[part[place].reshape(-1) for part in parts] for place in range(len(numbers))]

    def loss(self, number: int) -> float:
        """Return a microbatch's share of the mean loss of its batch."""
        return self._shares[number]

    def backward(self, numbers: Sequence[int], gradients: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Compute backward; return the gradients of the received values, flat, of each microbatch."""
        micros = [self.microbatch(number) for number in numbers]
        key, first, rows = numbers[0], micros[0], [micro.rows for micro in micros]
        passing = self._passing.pop(key)
        if not sum(rows):
            self._shares.pop(key, None)
            return [[self.like.new_zeros(0)] * self.inputs]
        with self.using(key):
            if self.recomputes:
                if self.statistics is not None:
                    self.statistics.begin(None)
                passing.outputs = self._computed(key, sum(rows), first, passing.leaves)
                if self.statistics is not None:
                    self.statistics.end()
                if self.stage.after is None:
                    passing.outputs = [self._loss(numbers, micros, passing.outputs[0])]
            joined = gradients[0]
            if len(micros) > 1:
                joined = [torch.cat(parts) for parts in zip(*gradients, strict=True)]
            given: list[Tensor | None] = [*joined] or [None]
            trained = [
                (value, gradient)
                for value, gradient in zip(passing.outputs, given, strict=True)
                if value.requires_grad
            ]
            if trained:
                torch.autograd.backward(
                    [value for value, _ in trained], [gradient for _, gradient in trained]
                )
        for number in numbers:
            self._shares.pop(number, None)
        if self.stage.before is None:
            return [[] for _ in numbers]
        found = [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).split(rows)
            for leaf in passing.leaves
        ]
        return [[part[place].reshape(-1) for part in found] for place in range(len(numbers))]

    def _loss(self, numbers: Sequence[int], micros: Sequence[Microbatch], logits: Tensor) -> Tensor:
        """Return the sum of the microbatches' losses, each by its scale, and note their shares of the batch's."""
        whole: Tensor | None = None
        parts = logits.split([micro.rows for micro in micros]) if len(micros) > 1 else (logits,)
        for number, micro, part in zip(numbers, micros, parts, strict=True):
            value = micro.loss(part)
            self._shares[number] = float(value.detach()) * micro.share
            scaled = _scaled(value, micro.scale)
            whole = scaled if whole is None else whole + scaled
        assert whole is not None
        return whole

    def weights(self, number: int) -> None:
        """Add the gradients of weights that `backward` has left."""
        deferred = self._deferred.pop(number, None)
        if deferred is not None:
            deferred.finish()

    def _computed(self, number: int, rows: int, micro: Microbatch, leaves: list[Tensor]) -> list[Tensor]:
        deferred: AbstractContextManager[Any] = nullcontext()
        if self.splits:
            deferred = self._deferred[number] = DeferredWeights()
        alone = by_running_statistics(self.stage.module) if rows == 1 else nullcontext()
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
                f"the message for microbatch {number} does not fit: {expected} numbers of {self.like.dtype} were "
                "expected; all workers must train the same network"
            )
        return vector.to(self.like.device).view(rows, *shape)


def _scaled(value: Tensor, scale: float) -> Tensor:
    return value if scale == 1.0 else value * scale
