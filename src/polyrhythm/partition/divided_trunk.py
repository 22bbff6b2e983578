"""Convolutions cut by their output channels, or by the height of images with exchanged borders, over K workers.

    channels   worker s computes channels s of each layer, of all examples     it needs: all channels, at a convolution
    height     worker s computes rows s of each layer, of all examples         it needs: the rows next to its own

    images ─▶ to all, or their rows ─▶ [ fetch ─▶ convolution ─▶ norm, relu, … ] … ─▶ to the examples' owners ─▶ rest

Every value in between is cut along one dimension d into K even slices; worker s holds the s-th. A convolution
needs an interval of d: all of it (channels), or for output rows [a, b), with kernel k, stride t, padding p
and dilation e, rows [a t - p, (b-1) t - p + e (k-1)], less those that are padding (height). It fetches the
missing rows from their holders, and in the backward pass sends them its gradients, which are added up in the
order of ranks:

    forward    y_s = f(x over need_s, W_s)                         W_s: the slice of W (channels), or all of W (height)
    backward   dx_s = sum_w  (dx of w's need, where it meets s)    dW_s complete (channels), or a part of a sum (height)

Batch normalization is over all examples that are computed together: by channel it needs no communication, by
height its sums are added up over workers, forward (sum x, then sum (x - mean)^2) and backward (sum dy, sum dy
x').

What is cut ends in front of the first operation that does not go by channels or rows (flattening; by height any pooling
to a fixed size). From there on every worker has its own examples whole, as in an undivided trunk.

Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012, for channels on
two devices; Dryden, Maruyama, Benson, Moon, Snir, Van Essen, "Improving Strong-Scaling of CNN Training by Exploiting
Finer-Grained Parallelism", IPDPS 2019, arXiv 1903.06681, for height (there: spatial parallelism).

Autograd works only within an operation, so no worker ever waits for another inside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.partition.activations import Activations, added, neurons, others
from polyrhythm.partition.chain import Chain
from polyrhythm.partition.cut import OF_SINGLE_NUMBERS, Cut
from polyrhythm.partition.held_rows import HeldRows
from polyrhythm.training.model_sizes import Exchange

Trunk = Literal["copied", "channels", "height"]
"""Division of the layers in front of the fully connected ones: every worker has them all, or a part of each."""

_DIMENSION = {"channels": 1, "height": 2}
_SUMS = (operator.add, operator.iadd, torch.add)
_RELU = (functional.relu, torch.relu)


@dataclass(frozen=True)
class _Window:
    """Input rows of an output row: `stride * row - padding + dilation * 0 … (kernel - 1)`."""

    kernel: int
    stride: int
    padding: int
    dilation: int


def _rows(window: _Window, out: slice) -> tuple[int, int]:
    """Return the first input row of some output rows and the one past the last; some of them may be padding."""
    first = out.start * window.stride - window.padding
    last = (out.stop - 1) * window.stride - window.padding + window.dilation * (window.kernel - 1)
    return first, last + 1


@dataclass(frozen=True)
class _Operation:
    """An operation on cut values.

    Attributes:
        node: node of the graph.
        kind: communication of the operation: `window` fetches first, `norm` adds sums up, `local` does
            neither.
        layer: module of the operation; None: a function.
        inputs: input nodes.
        window: window along the height, for the kind `window`; None: it needs all channels.
    """

    node: fx.Node
    kind: Literal["window", "norm", "local"]
    layer: nn.Module | None
    inputs: tuple[fx.Node, ...]
    window: _Window | None = None


class DividedTrunk:
    """The layers of a trunk that are cut, and the rest of it.

    Args:
        parts: parts of the network.
        image: (1, C, H, W), like the images that it will see; on the meta device where the network is.
        how: the dimension that is cut.
        workers: workers that share it.

    Attributes:
        pictures: operations that yield images, or copies of them, which need no gradients.
        rest: maps the values behind the cut layers, of whole examples, to features, in a tuple.
        ends: names of the last layer that is cut, and of the first operation that is not.

    Raises:
        RequestError: it has no convolution that can be cut so, or images have fewer rows than there are workers.
    """

    def __init__(self, parts: Cut, image: Tensor, how: Trunk, workers: int) -> None:
        self.how, self.workers, self._dim = how, workers, _DIMENSION[how]
        if how == "height" and image.shape[2] < workers:
            raise RequestError(
                f"images of {image.shape[2]} rows cannot be cut by height for {workers} workers: ask for "
                f"{image.shape[2]} workers at most, or for trunk=channels"
            )
        chain = self._chain = Chain(parts.trunk, image)
        operations: list[_Operation] = []
        known: set[fx.Node] = set()
        self.image = next(node for node in chain.graph.nodes if node.op == "placeholder")
        known.add(self.image)
        self.pictures = {self.image}
        stopped = ""
        for node in chain.operations:
            made = self._operation(node, known)
            if made is None:
                stopped = str(node.target) if node.op == "call_module" else node.name
                break
            operations.append(made)
            known.add(node)
        place = max(
            (number for number, each in enumerate(chain.cuts) if each.behind < len(operations)), default=-1
        )
        behind = chain.cuts[place].behind + 1 if place >= 0 else 0
        self.operations = tuple(operations[:behind])
        if not any(isinstance(each.layer, nn.Conv2d) for each in self.operations):
            raise RequestError(
                f"no convolution of the network can be cut by {how}"
                + (f": it ends at {stopped!r:.60}, before the first one" if stopped else "")
                + "; leave trunk out"
            )
        after = chain.cuts[place]
        self.outputs = after.values
        self.rest = chain.stage(place + 1, len(chain.pieces)).module
        last = [each.node for each in self.operations if each.node.op == "call_module"][-1]
        self.ends = str(last.target), stopped

    @property
    def layers(self) -> list[nn.Module]:
        """The layers with parameters that are cut, in order."""
        return [
            each.layer
            for each in self.operations
            if each.layer is not None and next(each.layer.parameters(), None) is not None
        ]

    @property
    def trains(self) -> bool:
        """Whether any of these layers is trained."""
        return any(each.requires_grad for layer in self.layers for each in layer.parameters())

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return (C, H, W) of one image's value, not cut."""
        shape = self._chain.shape(node)
        assert shape is not None
        return shape

    def held(self, node: fx.Node) -> list[slice]:
        """Return which slice of a value's dimension each worker holds: of images, by channels, everything."""
        size = self.shape(node)[self._dim - 1]
        if node in self.pictures and self.how == "channels":
            return [slice(0, size)] * self.workers
        return neurons(size, self.workers)

    def needs(self, operation: _Operation) -> list[slice]:
        """Return which slice of its input's dimension each worker needs for its outputs, at least an empty one."""
        size = self.shape(operation.inputs[0])[self._dim - 1]
        found = []
        for out in self.held(operation.node):
            if out.start == out.stop:
                found.append(slice(0, 0))
            elif operation.window is None:
                found.append(slice(0, size))
            else:
                first, stop = _rows(operation.window, out)
                start = min(max(first, 0), size)
                found.append(slice(start, max(start, min(stop, size))))
        return found

    def numbers(self, node: fx.Node, part: slice) -> int:
        """Return how many numbers of one image's value lie in a slice of its dimension."""
        shape = self.shape(node)
        width: int = part.stop - part.start
        return prod(shape) // shape[self._dim - 1] * width

    def exchanges(self, *, gradients: bool = True) -> tuple[Exchange, ...]:
        """Return the exchanges of the workers in a pass, in order.

        Args:
            gradients: whether any of its layers is trained; else nothing goes back.
        """
        workers = range(self.workers)
        images = tuple(self.numbers(self.image, part) for part in self.held(self.image))
        forward = [Exchange("own", (images,) * self.workers)]
        backward: list[Exchange] = []
        for operation in self.operations:
            if operation.kind == "window":
                (taken,) = operation.inputs
                held, needs = self.held(taken), self.needs(operation)
                sent = tuple(
                    tuple(
                        self.numbers(taken, common(held[i], needs[j]))
                        if i != j and not whole(held[j], needs[j])
                        else 0
                        for j in workers
                    )
                    for i in workers
                )
                forward.append(Exchange("all", sent))
                if taken not in self.pictures:
                    backward.append(Exchange("all", tuple(zip(*sent, strict=True))))
            elif operation.kind == "norm" and self.how == "height":
                count = self.shape(operation.node)[0]
                forward += [Exchange("fixed", ((count,) * self.workers,) * self.workers)] * 2
                backward.append(Exchange("fixed", ((2 * count,) * self.workers,) * self.workers))
        for node in self.outputs:
            slices = tuple(self.numbers(node, part) for part in self.held(node))
            forward.append(Exchange("others", tuple((count,) * self.workers for count in slices)))
            backward.append(Exchange("own", (slices,) * self.workers))
        # Gradients arrive in the reverse order; those of examples first.
        turned = backward[::-1] if gradients else []
        return (*forward, Exchange("head", ()), *turned)

    def _operation(self, node: fx.Node, known: set[fx.Node]) -> _Operation | None:
        """Return the divided form of an operation; None if it cannot be divided."""
        inputs = tuple(node.all_input_nodes)
        if not inputs or any(each not in known for each in inputs):
            return None
        shapes = [self._chain.shape(each) for each in (node, *inputs)]
        if any(shape is None or len(shape) != 3 for shape in shapes):
            return None
        if node.op == "call_module":
            layer = self._chain.layer(node)
            return self._layer(node, layer, inputs) if len(inputs) == 1 and not node.kwargs else None
        alike = len(set(shapes)) == 1
        copies = node.target is torch.empty_like or (node.op == "call_method" and node.target == "copy_")
        if copies and alike and self.pictures.issuperset(inputs):
            self.pictures.add(node)
            return _Operation(node, "local", None, inputs)
        # Slices of images are not those of other values with as many channels.
        images = not self.pictures.isdisjoint(inputs) and self.how == "channels"
        if node.op == "call_function" and alike and not images and node.target in (*_SUMS, *_RELU):
            return _Operation(node, "local", None, inputs)
        if node.op == "call_function" and node.target is torch.cat and self.how == "height":
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
            return _Operation(node, "local", None, inputs) if dim == 1 else None
        return None

    def _layer(self, node: fx.Node, layer: nn.Module, inputs: tuple[fx.Node, ...]) -> _Operation | None:
        """Return the divided form of a layer; None if it cannot be divided."""
        by_channels, of_images = self.how == "channels", inputs[0] in self.pictures
        if type(layer) is nn.Conv2d:
            return self._convolution(node, layer, inputs)
        if by_channels and of_images:
            return None  # which every worker has all channels of
        if type(layer) is nn.BatchNorm2d:
            return _Operation(node, "norm", layer, inputs)
        if isinstance(layer, OF_SINGLE_NUMBERS):
            return _Operation(node, "local", layer, inputs)
        if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            if by_channels:
                return _Operation(node, "local", layer, inputs)
            window = _window(layer)
            return None if window is None else _Operation(node, "window", layer, inputs, window)
        if by_channels and isinstance(layer, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d | nn.Dropout2d):
            return _Operation(node, "local", layer, inputs)
        return None

    def _convolution(self, node: fx.Node, layer: nn.Conv2d, inputs: tuple[fx.Node, ...]) -> _Operation | None:
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        if self.how == "height":
            return _Operation(node, "window", layer, inputs, _window(layer))
        if layer.groups == 1:
            return _Operation(node, "window", layer, inputs)
        if layer.groups == layer.in_channels == layer.out_channels and inputs[0] not in self.pictures:
            return _Operation(node, "local", layer, inputs)
        return None


def _window(layer: nn.Module) -> _Window | None:
    """Return the input window of an output row of a layer; None if it differs between rows."""
    kernel, stride, padding, dilation = (
        _first(getattr(layer, name, 1)) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    if getattr(layer, "ceil_mode", False) or getattr(layer, "return_indices", False):
        return None
    if isinstance(layer, nn.AvgPool2d) and padding and not layer.count_include_pad:
        return None
    return _Window(kernel, stride, padding, dilation)


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple) else value)


def _second(value: Any) -> int:
    return int(value[1] if isinstance(value, tuple) else value)


def common(first: slice, second: slice) -> slice:
    """Return the intersection of two slices; it may be empty."""
    start = max(first.start, second.start)
    return slice(start, max(start, min(first.stop, second.stop)))


def _within(part: slice, outer: slice) -> slice:
    """Return a part of a slice, counted from where that begins."""
    if part.start >= part.stop:
        return slice(0, 0)
    return slice(part.start - outer.start, part.stop - outer.start)


def whole(held: slice, need: slice) -> bool:
    """Return whether all that is needed is held."""
    return bool(held.start <= need.start and need.stop <= held.stop)


Backward = Callable[[Tensor], list[Tensor | None]]
"""Maps the gradient of an operation's outputs to those of its inputs, and adds to those of its parameters."""


class TrunkPass:
    """One worker's passes through the cut layers. All workers must call it equally often.

    Args:
        trunk: layers that are cut.
        activations: exchange with the others.
        held: rows of the layers that this worker has.
    """

    def __init__(self, trunk: DividedTrunk, activations: Activations, held: HeldRows) -> None:
        self._trunk = trunk
        self._dim = _DIMENSION[trunk.how]
        self._activations = activations
        self._held = held
        self._trains = trunk.trains
        self._tape: list[tuple[_Operation, Backward]] = []
        self._counts: list[int] = []

    def start(self, images: Tensor) -> list[Any]:
        """Start to send this worker's images (R, C, H, W), or the rows that others need of them."""
        held, activations = self._trunk.held(self._trunk.image), self._activations
        return [
            activations.start_to(to, self._part(images, held[to]))
            for to in others(activations.rank, activations.size)
        ]

    def forward(self, images: Tensor, sends: Sequence[bool]) -> list[Tensor]:
        """Compute forward; return the values behind the cut layers, of this worker's own images.

        Args:
            images: (R, C, H, W), images of this worker, already sent; R may be 0.
            sends: whether each worker has sent its images.
        """
        trunk, rank = self._trunk, self._activations.rank
        part = trunk.held(trunk.image)[rank]
        own = self._part(images, part)
        shape = (-1, *own.shape[1:])
        everybodys = [
            own if source == rank else self._activations.pictures(source, shape, own) if sent else own[:0]
            for source, sent in enumerate(sends)
        ]
        self._counts = [len(each) for each in everybodys]
        values = {trunk.image: torch.cat(everybodys)}
        self._tape = []
        if not any(self._counts):
            return [self._own_value(node, images, 0) for node in trunk.outputs]
        for operation in trunk.operations:
            value, backward = self._compute(operation, [values[each] for each in operation.inputs])
            values[operation.node] = value
            self._tape.append((operation, backward))
        return [self._to_owners(node, values[node]) for node in trunk.outputs]

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """Add to the gradients of the parameters; given those of what `forward` has returned."""
        if not self._trains or not any(self._counts):
            return
        trunk = self._trunk
        found = {
            node: self._from_owners(node, gradient)
            for node, gradient in reversed(list(zip(trunk.outputs, gradients, strict=True)))
        }
        while self._tape:
            operation, backward = self._tape.pop()
            if operation.node in trunk.pictures:
                continue
            for node, gradient in zip(operation.inputs, backward(found.pop(operation.node)), strict=True):
                if gradient is not None:
                    found[node] = found[node] + gradient if node in found else gradient

    def complete(self) -> None:
        """Complete the running statistics on all workers, which must all call it: by channels each has its own ones."""
        if self._trunk.how != "channels":
            return
        for operation in self._trunk.operations:
            layer = operation.layer
            if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None:
                assert layer.running_var is not None
                places = self._trunk.held(operation.node)
                for buffer in (layer.running_mean, layer.running_var):
                    mine = [buffer[places[self._activations.rank]]] * len(places)
                    taken = self._activations.swap(mine, [(part.stop - part.start,) for part in places])
                    buffer.copy_(torch.cat(taken))

    def _part(self, value: Tensor, part: slice) -> Tensor:
        return value.narrow(self._dim, part.start, part.stop - part.start)

    def _shaped(self, node: fx.Node, rows: int, part: slice) -> tuple[int, ...]:
        """Return the shape of a slice of the values of `rows` examples."""
        shape = list(self._trunk.shape(node))
        shape[self._dim - 1] = part.stop - part.start
        return (rows, *shape)

    def _own_value(self, node: fx.Node, like: Tensor, rows: int) -> Tensor:
        return like.new_zeros((rows, *self._trunk.shape(node)))

    def _compute(self, operation: _Operation, inputs: list[Tensor]) -> tuple[Tensor, Backward]:
        if operation.kind == "window":
            return self._fetched(operation, inputs[0])
        if operation.kind == "norm" and self._trunk.how == "height":
            assert isinstance(operation.layer, nn.BatchNorm2d)
            return self._normalized(operation.layer, inputs[0], self._trunk.shape(operation.node))
        mine = self._trunk.held(operation.node)[self._activations.rank]
        layer = operation.layer
        if mine.start == mine.stop:
            if isinstance(layer, nn.BatchNorm2d):
                _momentum(layer)
            return self._nothing(operation, inputs)
        parameters: list[tuple[Tensor, Tensor]] = []
        function: Callable[..., Tensor]
        if isinstance(layer, nn.BatchNorm2d):
            function, parameters = _norm_of(layer, mine, self._held)
        elif isinstance(layer, nn.Conv2d):  # each channel by itself
            function, parameters = _convolution_of(layer, mine, mine.stop - mine.start, self._held)
        elif layer is not None:
            copied = getattr(layer, "inplace", False)
            function = (lambda value: layer(value.clone())) if copied else layer
        elif operation.node.target is torch.empty_like:
            function = partial(torch.empty_like, **operation.node.kwargs)
        elif operation.node.target == "copy_":
            function = torch.Tensor.copy_
        elif operation.node.target is torch.cat:
            function = _concatenated
        elif operation.node.target in _SUMS:
            function = _sum_of(operation.node)
        else:
            function = torch.relu
        return _tracked(function, inputs, parameters, wanted=self._wanted(operation))

    def _nothing(self, operation: _Operation, inputs: list[Tensor]) -> tuple[Tensor, Backward]:
        """Return the empty slice of a worker without rows or channels."""
        rows, mine = sum(self._counts), self._trunk.held(operation.node)[self._activations.rank]
        empty = inputs[0].new_zeros(self._shaped(operation.node, rows, mine))
        return empty, _nowhere(inputs)

    def _wanted(self, operation: _Operation) -> list[bool]:
        """Return whether each input needs its gradient; images do not."""
        return [self._trains and each not in self._trunk.pictures for each in operation.inputs]

    def _fetched(self, operation: _Operation, own: Tensor) -> tuple[Tensor, Backward]:
        """Fetch what a window needs, and compute it."""
        trunk, rank = self._trunk, self._activations.rank
        (node,) = operation.inputs
        held, needs, rows = trunk.held(node), trunk.needs(operation), sum(self._counts)
        mine, need = trunk.held(operation.node)[rank], needs[rank]
        # Nothing is sent if every worker has all of it.
        given = [
            slice(0, 0) if whole(held[to], needs[to]) and to != rank else common(held[rank], needs[to])
            for to in range(trunk.workers)
        ]
        taken = [
            slice(0, 0) if whole(held[rank], need) and source != rank else common(held[source], need)
            for source in range(trunk.workers)
        ]

        sent = [self._part(own, _within(part, held[rank])) for part in given]
        pieces = self._activations.swap(sent, [self._shaped(node, rows, part) for part in taken])
        value = torch.cat([each for each in pieces if each.shape[self._dim]] or pieces[:1], self._dim)
        wanted = self._wanted(operation)[0]
        if mine.start == mine.stop:
            outputs = own.new_zeros(self._shaped(operation.node, rows, mine))
            local = _nowhere([value])
        else:
            function, parameters = self._windowed(operation, mine, need)
            outputs, local = _tracked(function, [value], parameters, wanted=[wanted])

        def backward(gradient: Tensor) -> list[Tensor | None]:
            (inner,) = local(gradient)
            if not wanted:
                return [None]
            assert inner is not None
            back = [self._part(inner, _within(part, need)) for part in taken]
            arrived = self._activations.swap(back, [self._shaped(node, rows, part) for part in given])
            total = torch.zeros_like(own)
            for part, each in zip(given, arrived, strict=True):
                if part.stop > part.start:
                    self._part(total, _within(part, held[rank])).add_(each)
            return [total]

        return outputs, backward

    def _windowed(
        self, operation: _Operation, mine: slice, need: slice
    ) -> tuple[Callable[..., Tensor], list[tuple[Tensor, Tensor]]]:
        layer, window = operation.layer, operation.window
        if window is None:
            assert isinstance(layer, nn.Conv2d)
            return _convolution_of(layer, mine, 1, self._held)
        first, stop = _rows(window, mine)
        size = self._trunk.shape(operation.inputs[0])[1]
        above, below = max(0, min(-first, stop - first)), max(0, stop - max(size, first))
        return _rows_of(layer, above, below)

    def _normalized(
        self, layer: nn.BatchNorm2d, own: Tensor, shape: tuple[int, ...]
    ) -> tuple[Tensor, Backward]:
        """Normalize by the statistics of all rows, which the workers add up."""
        count, channels = sum(self._counts) * shape[1] * shape[2], (1, -1, 1, 1)
        if count < 2:
            raise RequestError("batch normalization of a single value has no variance: take larger batches")
        mean = self._summed(own.sum((0, 2, 3))) / count
        apart = own - mean.view(channels)
        variance = self._summed(apart.square().sum((0, 2, 3))) / count
        scale = torch.rsqrt(variance + layer.eps)
        normal = apart * scale.view(channels)
        momentum = _momentum(layer)
        if layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.lerp_(mean, momentum)
            layer.running_var.lerp_(variance * (count / (count - 1)), momentum)
        outputs = normal
        if layer.affine:
            outputs = normal * layer.weight.detach().view(channels) + layer.bias.detach().view(channels)

        def backward(gradient: Tensor) -> list[Tensor | None]:
            of_bias, of_weight = gradient.sum((0, 2, 3)), (gradient * normal).sum((0, 2, 3))
            _add(layer.bias, slice(None), of_bias)
            _add(layer.weight, slice(None), of_weight)
            sums = self._summed(torch.cat([of_bias, of_weight]))
            first, second = (each.view(channels) / count for each in sums.chunk(2))
            inner = (gradient - first - normal * second) * scale.view(channels)
            return [inner * layer.weight.detach().view(channels) if layer.affine else inner]

        return outputs, backward

    def _summed(self, own: Tensor) -> Tensor:
        size = self._activations.size
        return added(self._activations.swap([own] * size, [tuple(own.shape)] * size))

    def _to_owners(self, node: fx.Node, value: Tensor) -> Tensor:
        rank, held = self._activations.rank, self._trunk.held(node)
        own = self._counts[rank]
        shapes = [self._shaped(node, own, part) for part in held]
        taken = self._activations.swap(value.split(self._counts), shapes)
        return torch.cat(taken, self._dim).detach().requires_grad_(self._trains)

    def _from_owners(self, node: fx.Node, gradient: Tensor) -> Tensor:
        rank, held = self._activations.rank, self._trunk.held(node)
        shapes = [self._shaped(node, count, held[rank]) for count in self._counts]
        parts = [self._part(gradient, part) for part in held]
        return torch.cat(self._activations.swap(parts, shapes))


def cut_rows(trunk: DividedTrunk) -> Iterator[nn.Parameter]:
    """Yield the parameters with rows distributed over workers: by channels, those of all layers that are cut."""
    if trunk.how == "channels":
        for layer in trunk.layers:
            yield from layer.parameters()


def _tracked(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[tuple[Tensor, Tensor]],
    *,
    wanted: Sequence[bool],
) -> tuple[Tensor, Backward]:
    """Compute a function of inputs, and of leaves that stand for parts of parameters; return how to go back."""
    leaves = [value.detach().requires_grad_(needed) for value, needed in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        outputs = function(*leaves)
    trained = [(parameter, leaf) for parameter, leaf in parameters if leaf.requires_grad]

    def backward(gradient: Tensor) -> list[Tensor | None]:
        asked = [leaf for _, leaf in trained] + [leaf for leaf in leaves if leaf.requires_grad]
        if not asked:
            return [None] * len(leaves)
        found = list(torch.autograd.grad(outputs, asked, gradient))
        for (parameter, leaf), part in zip(trained, found, strict=False):
            _add(parameter, _rows_like(parameter, leaf), part)
        rest = iter(found[len(trained) :])
        return [next(rest) if leaf.requires_grad else None for leaf in leaves]

    return outputs.detach(), backward


def _nowhere(inputs: Sequence[Tensor]) -> Backward:
    """Return the way back of a value that nothing depends on."""
    return lambda _: [torch.zeros_like(each) for each in inputs]


def _rows_like(parameter: Tensor, leaf: Tensor) -> slice:
    """Return the rows of a parameter that share their memory with a leaf."""
    width = max(1, parameter[0].numel())
    start = (leaf.storage_offset() - parameter.storage_offset()) // width
    return slice(start, start + len(leaf))


def _add(parameter: Tensor | None, rows: slice, gradient: Tensor) -> None:
    if parameter is None or not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[rows] += gradient


def _leaf(parameter: Tensor | None, rows: slice, held: HeldRows | None = None) -> list[tuple[Tensor, Tensor]]:
    if parameter is None:
        return []
    own, place = (parameter, rows) if held is None else held.of(parameter, rows)
    return [(own, own.detach()[place].requires_grad_(parameter.requires_grad))]


def _convolution_of(
    layer: nn.Conv2d, channels: slice, groups: int, held: HeldRows
) -> tuple[Callable[..., Tensor], list[tuple[Tensor, Tensor]]]:
    """Return a convolution's output channels as a function of its inputs."""
    parameters = _leaf(layer.weight, channels, held) + _leaf(layer.bias, channels, held)
    weight, bias = parameters[0][1], parameters[1][1] if len(parameters) > 1 else None

    def function(value: Tensor) -> Tensor:
        return functional.conv2d(value, weight, bias, layer.stride, layer.padding, layer.dilation, groups)

    return function, parameters


def _rows_of(
    layer: nn.Module | None, above: int, below: int
) -> tuple[Callable[..., Tensor], list[tuple[Tensor, Tensor]]]:
    """Return a layer as a function of the rows that its own output rows need, padded by `above` and `below` rows."""
    everything = slice(None)
    if isinstance(layer, nn.Conv2d):
        parameters = _leaf(layer.weight, everything) + _leaf(layer.bias, everything)
        weight, bias = parameters[0][1], parameters[1][1] if len(parameters) > 1 else None
        stride, sideways, dilation = layer.stride, (0, _second(layer.padding)), layer.dilation

        def convolution(value: Tensor) -> Tensor:
            padded = functional.pad(value, (0, 0, above, below))
            return functional.conv2d(padded, weight, bias, stride, sideways, dilation, layer.groups)

        return convolution, parameters
    assert isinstance(layer, nn.MaxPool2d | nn.AvgPool2d)
    kernel, step, beside = layer.kernel_size, layer.stride, (0, _second(layer.padding))
    if isinstance(layer, nn.MaxPool2d):
        spread = layer.dilation

        def largest(value: Tensor) -> Tensor:
            padded = functional.pad(value, (0, 0, above, below), value=float("-inf"))
            return functional.max_pool2d(padded, kernel, step, beside, spread)

        return largest, []
    divisor = layer.divisor_override

    def mean(value: Tensor) -> Tensor:
        padded = functional.pad(value, (0, 0, above, below))
        return functional.avg_pool2d(padded, kernel, step, beside, divisor_override=divisor)

    return mean, []


def _norm_of(
    layer: nn.BatchNorm2d, channels: slice, held: HeldRows
) -> tuple[Callable[..., Tensor], list[tuple[Tensor, Tensor]]]:
    """Return batch normalization of some channels as a function, which changes their running statistics."""
    parameters = _leaf(layer.weight, channels, held) + _leaf(layer.bias, channels, held)
    weight, bias = (parameters[0][1], parameters[1][1]) if layer.affine else (None, None)

    means, variances = layer.running_mean, layer.running_var
    if means is not None and variances is not None:
        means, variances = means[channels], variances[channels]

    def function(value: Tensor) -> Tensor:
        return functional.batch_norm(
            value, means, variances, weight, bias, training=True, momentum=_momentum(layer), eps=layer.eps
        )

    return function, parameters


def _momentum(layer: nn.BatchNorm2d) -> float:
    """Count a batch, and return its part of the running statistics."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
        if layer.momentum is None:
            return 1 / float(layer.num_batches_tracked)
    return layer.momentum or 0.0


def _concatenated(*values: Tensor) -> Tensor:
    return torch.cat(values, 1)


def _sum_of(node: fx.Node) -> Callable[..., Tensor]:
    """Return a sum as a function of the tensors in it; other terms are as the network has them."""
    nodes = list(node.all_input_nodes)

    def function(*values: Tensor) -> Tensor:
        first, second = (
            values[nodes.index(each)] if isinstance(each, fx.Node) else each for each in node.args[:2]
        )
        options: dict[str, Any] = dict(node.kwargs)
        found: Tensor = torch.add(cast(Tensor, first), cast(Tensor, second), **options)
        return found

    return function
