"""Cost of a network: multiply-adds, work and depth, and memory, layer by layer, counted without computing anything.

The network runs once, forward and backward, on tensors that have shapes but no numbers, and every operation is counted:

    work     of a product its multiply-adds; of anything else the elements that it reads or writes, whichever are more
    depth    steps that follow each other however many processors there are: a sum of n takes log2 n, rounded up

    a sum of n products        1 + log2 n      convolutions, fully connected layers, attention
    a mean, a maximum of n     log2 n          pooling; batch normalization takes two means and four steps more
    anything else              1               views take nothing

The depth of a network is that of its longest path: branches of an Inception block lie next to each other. Work over
depth is the average parallelism. Ben-Nun, Hoefler, "Demystifying Parallel and Distributed Deep Learning", ACM CSUR
2019, section 3 and table 4.

Activations are what autograd keeps for the backward pass, each storage once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyrhythm.cost.convolution import Convolution
from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.sizes import SizesAlone

LOSS = "(loss)"


@dataclass(kw_only=True)
class AnalyzedLayer:
    """Cost of a module itself, without the modules in it, for one batch.

    Attributes:
        name: name of the module; empty: the network itself.
        kind: class of the module.
        parameters: trained numbers of its own.
        multiply_adds: multiply-add operations of its forward pass, as `torch.utils.flop_counter` counts them,
            two operations each.
        work: work of its forward pass.
        depth: the sum of its operations' depths.
        output: shape of what it returns last.
        saved_bytes: bytes of activations that the backward pass needs, and that no layer before keeps.
        convolutions: convolutions of the layer.
    """

    name: str
    kind: str
    parameters: int
    multiply_adds: int = 0
    work: int = 0
    depth: int = 0
    output: tuple[int, ...] = ()
    saved_bytes: int = 0
    convolutions: list[Convolution] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Cost of a training step.

    Attributes:
        layers: layers that have parameters or do something, in the order in which they are first used.
        batch: images.
        parameters: trained numbers.
        parameter_bytes: bytes of all of them.
        buffer_bytes: bytes of what is not trained, as running means.
        multiply_adds: multiply-add operations of the forward pass.
        backward_multiply_adds: multiply-add operations of the backward pass.
        work: work of the forward pass.
        depth: depth of the forward pass.
        step_work: work of forward and backward pass and the loss.
        step_depth: depth of forward and backward pass and the loss.
        activation_bytes: kept for the backward pass.
    """

    layers: tuple[AnalyzedLayer, ...]
    batch: int
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    multiply_adds: int
    backward_multiply_adds: int
    work: int
    depth: int
    step_work: int
    step_depth: int
    activation_bytes: int

    @property
    def average_parallelism(self) -> float:
        """Work over depth of a whole step."""
        return self.step_work / self.step_depth

    def training_bytes(self, states: int) -> int:
        """Return the memory of training: parameters, gradients, the optimizer's vectors of that size, activations.

        Args:
            states: vectors of the optimizer, 1 for momentum, 2 for Adam.
        """
        return (2 + states) * self.parameter_bytes + self.buffer_bytes + self.activation_bytes


def analysis_of(model: nn.Module, image_shape: tuple[int, int, int], batch: int) -> Analysis:
    """Return the cost of one training step of a classifier.

    Args:
        model: model on the meta device; its gradients are set.
        image_shape: (C, H, W) of an image.
        batch: images in the step.

    Raises:
        RequestError: the network looks at numbers, and so cannot run on shapes alone.
    """
    model.train()
    layers = _Layers(model)
    own = {
        _identity(tensor.untyped_storage())
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.numel()
    }
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (identity := _identity(storage)) not in own and identity not in kept:
            kept[identity] = storage  # held, so that no other gets its address
            layers.current.saved_bytes += storage.nbytes()
        return tensor

    counting = _Counting(layers)
    images = torch.empty(batch, *image_shape, device="meta")
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor), counting:
            output = model(images)
            forward = counting.multiply_adds, counting.work, counting.depth
            layers.enter(LOSS)
            targets = torch.empty(batch, dtype=torch.long, device="meta")
            loss = functional.cross_entropy(output, targets)
        counting.forward = False
        with counting:
            loss.backward()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"this network cannot be analyzed at batch {batch}: {reason:.300}") from error
    finally:
        layers.close()
    multiply_adds, work, depth = forward
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Analysis(
        layers=tuple(layer for layer in layers.used if layer.parameters or layer.work),
        batch=batch,
        parameters=sum(parameter.numel() for parameter in trained),
        parameter_bytes=sum(parameter.nbytes for parameter in trained),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        multiply_adds=multiply_adds,
        backward_multiply_adds=counting.multiply_adds - multiply_adds,
        work=work,
        depth=depth,
        step_work=counting.work,
        step_depth=counting.depth,
        activation_bytes=sum(storage.nbytes() for storage in kept.values()),
    )


def step_multiply_adds(model: nn.Module, image_shape: tuple[int, int, int], batch: int) -> float:
    """Return the multiply-adds of a training step, forward and backward, which grow with the batch.

    Args:
        model: model on the meta device; its gradients are set.
        image_shape: (C, H, W) of an image.
        batch: images in the step.

    Raises:
        RequestError: the network cannot run on shapes alone.
    """
    if isinstance(model, SizesAlone):
        return model.multiply_adds * batch
    pair = analysis_of(model, image_shape, 2)  # one image alone is too few for batch normalization
    return (pair.multiply_adds + pair.backward_multiply_adds) / 2 * batch


class _Layers:
    """The modules of a network, and which of them is running."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {
            name: AnalyzedLayer(
                name=name,
                kind=type(module).__name__,
                parameters=sum(
                    each.numel() for each in module.parameters(recurse=False) if each.requires_grad
                ),
            )
            for name, module in model.named_modules()
        }
        self._known[LOSS] = AnalyzedLayer(name=LOSS, kind="CrossEntropyLoss", parameters=0)
        self.used: list[AnalyzedLayer] = []
        self._running: list[AnalyzedLayer] = []
        self._hooks = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    @property
    def current(self) -> AnalyzedLayer:
        """The innermost that is running."""
        return self._running[-1]

    def enter(self, name: str) -> None:
        """Mark the beginning of a module."""
        layer = self._known[name]
        if not any(layer is each for each in self.used):
            self.used.append(layer)
        self._running.append(layer)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            self.enter(name)

        return enter

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        layer = self._running.pop()
        if isinstance(output, Tensor):
            layer.output = tuple(output.shape)


def _identity(storage: Any) -> int:
    """Return a key that identifies a storage among those alive: on the meta device none has an address of its own."""
    number: int = storage._cdata
    return number


class _Counting(TorchDispatchMode):
    """Counts every operation, those of the `forward` pass by layer, and how deep tensors lie below the images."""

    def __init__(self, layers: _Layers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = layers
        self.forward = True
        self._depths: dict[int, tuple[Any, int]] = {}  # by storage, which is held
        self.multiply_adds = 0
        self.work = 0
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        storages = {_identity(each.untyped_storage()) for each in given}
        viewed = func.is_view or (
            not func._schema.is_mutable
            and all(_identity(each.untyped_storage()) in storages for each in made)
        )
        products, work, depth = (0, 0, 0) if viewed or not given else _cost(func, args, given, made)
        before = max((self._depths.get(each, (None, 0))[1] for each in storages), default=0)
        for each in made:
            storage = each.untyped_storage()
            self._depths[_identity(storage)] = (storage, before + depth)
        self.multiply_adds += products
        self.work += work
        self.depth = max(self.depth, before + depth)
        if self.forward:
            layer = self._layers.current
            layer.multiply_adds += products
            layer.work += work
            layer.depth += depth
            if func is torch.ops.aten.convolution.default and not args[6]:
                _note_convolution(layer, args, made[0])
        return result


def _note_convolution(layer: AnalyzedLayer, args: Any, output: Tensor) -> None:
    images, weight, _, stride, padding, dilation, _, _, groups = args
    if weight.dim() != 4:
        return
    layer.convolutions.append(
        Convolution(
            images=images.shape[0],
            channels=images.shape[1],
            filters=output.shape[1],
            input_size=tuple(images.shape[2:]),
            output_size=(output.shape[2], output.shape[3]),
            kernel=tuple(weight.shape[2:]),
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            groups=groups,
        )
    )


def _log2(terms: int) -> int:
    """Return the depth of a sum: `⌈log2 n⌉`."""
    return max(terms - 1, 0).bit_length()


def _cost(func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> tuple[int, int, int]:
    """Return multiply-adds, work and depth of one operation."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS:
        multiply_adds, depth = _PRODUCTS[name](args, made)
        return multiply_adds, multiply_adds, depth
    elements = max((each.numel() for each in (*given, *made)), default=0)
    if name in _NORMALISATIONS:
        statistics = max((each.numel() for each in made[1:]), default=1) or 1
        return 0, elements, 2 * _log2(elements // statistics) + 4
    if "pool" in name:
        window = prod(args[1]) if name in _WINDOWED else max(1, _ratio(given, made))
        return 0, max(elements, min(map(Tensor.numel, made), default=0) * window), _log2(window)
    if name in _REDUCTIONS:
        return 0, elements, _log2(max(1, _ratio(given, made)))
    if "softmax" in name:
        return 0, elements, 2 * _log2(given[0].shape[-1]) + 2
    return 0, elements, 1


def _ratio(given: list[Tensor], made: list[Tensor]) -> int:
    return given[0].numel() // max(1, made[0].numel()) if made else 1


_NORMALISATIONS = {
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
}
_REDUCTIONS = {"mean", "sum", "amax", "max", "nll_loss_forward", "linalg_vector_norm", "var", "std"}
_WINDOWED = {"max_pool2d_with_indices", "avg_pool2d"}


def _convolved(args: Any, made: list[Tensor]) -> tuple[int, int]:
    images, weight, transposed = args[0], args[1], args[6]
    # Every weight of a transposed convolution meets every pixel of its input, else of its output.
    pixels = prod((images if transposed else made[0]).shape[2:])
    terms = prod(weight.shape[1:])
    bias = args[2] is not None
    return images.shape[0] * pixels * weight.numel(), 1 + _log2(terms) + bias


def _convolved_back(args: Any, made: list[Tensor]) -> tuple[int, int]:
    gradients, images, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    pixels = prod((images if transposed else gradients).shape[2:])
    one_pass = images.shape[0] * pixels * weight.numel()
    to_images = 1 + _log2(weight.numel() // weight.shape[1]) if wanted[0] else 0
    to_weights = 1 + _log2(images.shape[0] * pixels) if wanted[1] else 0
    return one_pass * (wanted[0] + wanted[1]), max(to_images, to_weights)


def _multiplied(first: Tensor, second: Tensor) -> int:
    return first.numel() * second.shape[-1]


_PRODUCTS: dict[str, Callable[[Any, list[Tensor]], tuple[int, int]]] = {
    "convolution": _convolved,
    "convolution_backward": _convolved_back,
    "mm": lambda args, made: (_multiplied(args[0], args[1]), 1 + _log2(args[0].shape[-1])),
    "bmm": lambda args, made: (_multiplied(args[0], args[1]), 1 + _log2(args[0].shape[-1])),
    "addmm": lambda args, made: (_multiplied(args[1], args[2]), 2 + _log2(args[1].shape[-1])),
    "baddbmm": lambda args, made: (_multiplied(args[1], args[2]), 2 + _log2(args[1].shape[-1])),
}
