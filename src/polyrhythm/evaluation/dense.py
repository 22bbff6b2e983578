"""Dense evaluation: a network trained on small images is applied at every position of a larger one.

P. Sermanet and others, "OverFeat", ICLR 2014, arXiv:1312.6229; K. Simonyan, A. Zisserman, "Very deep
convolutional networks for large-scale image recognition", ICLR 2015, arXiv:1409.1556, section 3.2.

    flatten (C, h, w) then Linear (F, C h w)   becomes   a convolution (F, C, h, w)     weights in the order C, h, w
    later Linear (F, D)                        becomes   a convolution (F, D, 1, 1)
    mean over the whole map (h, w)             becomes   a mean over every window (h, w), with stride 1

h and w are the sides of the map at training size, so such an image has the same scores as before; a larger one has
one vector of scores per position, and these are averaged. Not in the papers: networks that end in global pooling,
which keeps the window size that it had in training. Squeeze-and-excitation and the padding of convolutions see the
whole image instead of the window, so there the dense scores differ from those of windows that are cut out.

The network is traced as a graph in which every module that maps feature maps to feature maps is one node, and every
node knows its shape at training size. It is rewritten from its first flattening on: what was flat becomes a map of one
or more positions.

A network that cannot be converted is evaluated by brute force (`SlidingWindows`): windows of the training size are cut
out of the larger image, one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

_TOLERANCE = 1e-4


def to_dense(model: nn.Module, image_shape: tuple[int, int, int]) -> DenseNetwork:
    """Make a network fully convolutional, with copies of its weights.

    Args:
        model: maps images (B, C, H, W) of its training size to logits (B, classes); not changed.
        image_shape: (C, H, W) of the images that it was trained on.

    Raises:
        NotConvertible: it cannot be converted, or the result has other scores at training size.
    """
    training = [module.training for module in model.modules()]
    model.eval()
    try:
        probe = _probe(model, image_shape)
        with torch.no_grad():
            dense = DenseNetwork(Conversion(traced(model, probe)).converted()).eval()
            _check(model, dense, probe)
    except NotConvertible:
        raise
    except Exception as error:  # a network can be built, and fail to be traced, in any way
        raise NotConvertible(f"it cannot be traced ({' '.join(str(error).split())[:120]})") from error
    finally:
        for module, flag in zip(model.modules(), training, strict=True):
            module.training = flag
    return dense


def _probe(model: nn.Module, image_shape: tuple[int, int, int]) -> Tensor:
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, *image_shape, generator=generator).to(weight.device, weight.dtype)


def _check(model: nn.Module, dense: DenseNetwork, probe: Tensor) -> None:
    expected, found = model(probe), dense(probe)
    if found.shape != expected.shape:
        raise NotConvertible(f"it gives {tuple(found.shape)} where the network gives {tuple(expected.shape)}")
    # Relative to the largest logit, since convolutions add in another order than matrix products.
    scale = float(expected.abs().max()) + 1.0
    if float((found - expected).abs().max()) > _TOLERANCE * scale:
        raise NotConvertible("the converted network gives other scores at training size")
    try:
        dense(nn.functional.pad(probe, (0, 64, 0, 64)))
    except Exception:  # as above
        raise NotConvertible("its layers support images of one size only") from None


class NotConvertible(Exception):
    """A network cannot be made fully convolutional; the message is the reason."""


class DenseNetwork(nn.Module):
    """A network with the mean of the score vectors of all positions as output.

    Args:
        convolutional: maps (B, C, H, W) to scores (B, classes, h, w).
    """

    def __init__(self, convolutional: nn.Module) -> None:
        super().__init__()
        self.convolutional = convolutional

    def score_map(self, images: Tensor) -> Tensor:
        """Return the scores of every position, (B, classes, h, w), for images (B, C, H, W)."""
        scores: Tensor = self.convolutional(images)
        return scores

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores (B, classes) of images (B, C, H, W), averaged over all positions."""
        return self.score_map(images).mean((2, 3))


MAP_DIMENSIONS = 4


def traced(model: nn.Module, probe: Tensor) -> fx.GraphModule:
    """Trace a network as a graph with each node's shape in `meta["shape"]`, None for values that are no tensors.

    Args:
        model: model in evaluation mode.
        probe: (B, C, H, W), images of its training size.
    """
    if isinstance(model, nn.Linear | nn.Conv2d):
        model = nn.Sequential(model)
    graph = _HeadTracer(_feature_modules(model, probe)).trace(model)
    found = fx.GraphModule(model, graph)
    _Shapes(found).run(probe)
    return found


class _HeadTracer(fx.Tracer):
    """Traces into the modules after the last feature map only; feature extractors stay single nodes."""

    def __init__(self, whole: frozenset[str]) -> None:
        super().__init__()
        self._whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._whole or super().is_leaf_module(m, module_qualified_name)


def _feature_modules(model: nn.Module, probe: Tensor) -> frozenset[str]:
    """Return the names of the modules that map a feature map to another one with more than one position."""
    found: set[str] = set()
    hooks = []
    for name, module in model.named_modules():
        if name:

            def note(_: nn.Module, given: Any, made: Any, name: str = name) -> None:
                if _is_map(given[0] if given else None) and _is_map(made) and made.shape[-1] > 1:
                    found.add(name)

            hooks.append(module.register_forward_hook(note))
    try:
        model(probe)
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(found)


def _is_map(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == MAP_DIMENSIONS


class _Shapes(fx.Interpreter):
    """Records the shape of every node at training size."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        n.meta["shape"] = tuple(made.shape) if isinstance(made, Tensor) else None
        return made


def as_convolution(layer: nn.Linear, window: tuple[int, int]) -> nn.Conv2d:
    """Return a fully connected layer over flattened (C, h, w) as a convolution with windows (h, w)."""
    channels = layer.in_features // prod(window)
    made = nn.Conv2d(channels, layer.out_features, window, bias=layer.bias is not None)
    made = made.to(layer.weight.device, layer.weight.dtype)
    made.weight.copy_(layer.weight.view(layer.out_features, channels, *window))
    if layer.bias is not None and made.bias is not None:
        made.bias.copy_(layer.bias)
    return made


def as_batch_norm_2d(layer: nn.BatchNorm1d) -> nn.BatchNorm2d:
    """Return a batch norm over (B, C) as one over maps (B, C, h, w)."""
    made = nn.BatchNorm2d(
        layer.num_features, layer.eps, affine=layer.affine, track_running_stats=layer.track_running_stats
    )
    made.load_state_dict(layer.state_dict())
    return made.to(next(iter(layer.state_dict().values())).device).eval()


_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Hardswish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Identity,
)
_ELEMENTWISE_NAMES = frozenset(
    [
        "relu",
        "relu_",
        "relu6",
        "leaky_relu",
        "gelu",
        "silu",
        "hardswish",
        "tanh",
        "sigmoid",
        "dropout",
        "contiguous",
    ]
)
_FLATTENS = frozenset(["flatten", "view", "reshape", "squeeze"])


class Conversion:
    """Rewrites a network as fully convolutional, from its first flattening on.

    Args:
        traced: result of `traced`; changed in place.

    Attributes:
        windows: by flattened value, height and width of the feature map that was flattened, which becomes the kernel of
            the next linear layer; (1, 1) after that layer.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        self._traced = traced
        self.windows: dict[fx.Node, tuple[int, int]] = {}

    def converted(self) -> nn.Module:
        """Return the fully convolutional network.

        Raises:
            NotConvertible: it contains something that is not known to be convertible.
        """
        graph = self._traced.graph
        for node in list(graph.nodes):
            if node.op in ("call_module", "call_function", "call_method"):
                self._rewrite(node)
        out = next(node for node in graph.nodes if node.op == "output").args[0]
        if self.windows.get(out) != (1, 1):
            raise NotConvertible("it does not end in a fully connected layer or pooled scores")
        graph.eliminate_dead_code()
        self._traced.delete_all_unused_submodules()
        self._traced.recompile()
        return self._traced

    def _rewrite(self, node: fx.Node) -> None:
        given = [argument for argument in node.all_input_nodes if argument.meta.get("shape") is not None]
        if any(argument in self.windows for argument in given):
            self._rewrite_flat(node, given)
        elif given and self._pools(node):
            self._pool_windows(node, given[0])
        elif given and self._flattens(node, given[0]):
            self._keep_map(node, given[0])
        elif given and self._resizes(node):
            if node.meta["shape"] != given[0].meta["shape"]:
                raise NotConvertible(f"it pools to {node.meta['shape'][2]} places a side, for any input")
            node.replace_all_uses_with(given[0])  # nothing at training size, no windows on a larger image

    def _pool_windows(self, node: fx.Node, source: fx.Node) -> None:
        """Replace a mean over the whole map by a mean over every window."""
        height, width = source.meta["shape"][2:]
        flat = len(node.meta["shape"]) == 2
        pool = self._add(nn.AvgPool2d((height, width), stride=1), node, source)
        if flat:
            self.windows[pool] = (1, 1)

    def _keep_map(self, node: fx.Node, source: fx.Node) -> None:
        """Replace a flattening by the map itself, as a node of its own, since other nodes may read the map too."""
        with self._traced.graph.inserting_before(node):
            flat_map = self._traced.graph.call_method("contiguous", (source,))
        flat_map.meta["shape"] = node.meta["shape"]
        node.replace_all_uses_with(flat_map)
        height, width = source.meta["shape"][2:]
        self.windows[flat_map] = (height, width)

    def _rewrite_flat(self, node: fx.Node, given: list[fx.Node]) -> None:
        window = self.windows[given[0]]
        module = self._module(node)
        if len(given) > 1:
            raise NotConvertible(f"its head joins several values ({node.name})")
        if isinstance(module, nn.Linear):
            self.windows[self._add(as_convolution(module, window), node, given[0])] = (1, 1)
        elif isinstance(module, nn.BatchNorm1d) and window == (1, 1):
            self.windows[self._add(as_batch_norm_2d(module), node, given[0])] = window
        elif isinstance(module, _ELEMENTWISE) or (module is None and _name(node) in _ELEMENTWISE_NAMES):
            self.windows[node] = window
        elif node.op == "call_function" and node.target is nn.functional.linear:
            raise NotConvertible("its head multiplies by weights outside a layer")
        elif self._keeps_shape(node, given[0]) and (
            isinstance(module, nn.Flatten) or (module is None and _name(node) in _FLATTENS)
        ):
            node.replace_all_uses_with(given[0])
        elif node.users:
            raise NotConvertible(f"its head has {type(module).__name__ if module else _name(node)}")

    def _pools(self, node: fx.Node) -> bool:
        """Whether a node averages a map to one position."""
        shape = node.meta["shape"]
        if shape is None or prod(shape[2:]) != 1:
            return False
        source = node.all_input_nodes[0].meta.get("shape")
        if source is None or len(source) != MAP_DIMENSIONS or prod(source[2:]) == 1:
            return False
        if self._resizes(node):
            return True
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return _name(node) == "mean" and _is_spatial(axes)

    def _resizes(self, node: fx.Node) -> bool:
        return isinstance(self._module(node), nn.AdaptiveAvgPool2d) or _name(node) == "adaptive_avg_pool2d"

    def _flattens(self, node: fx.Node, source: fx.Node) -> bool:
        before, after = source.meta["shape"], node.meta["shape"]
        if before is None or after is None or len(before) != MAP_DIMENSIONS:
            return False
        flat = tuple(after) == (before[0], prod(before[1:]))
        return flat and (isinstance(self._module(node), nn.Flatten) or _name(node) in _FLATTENS)

    @staticmethod
    def _keeps_shape(node: fx.Node, source: fx.Node) -> bool:
        return bool(node.meta["shape"] == source.meta["shape"])

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._traced.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _add(self, module: nn.Module, node: fx.Node, source: fx.Node) -> fx.Node:
        """Replace a node by a new module."""
        name = f"dense_{node.name}"
        self._traced.add_module(name, module)
        with self._traced.graph.inserting_after(node):
            made = self._traced.graph.call_module(name, (source,))
        made.meta["shape"] = node.meta["shape"]
        node.replace_all_uses_with(made)
        return made


def _is_spatial(axes: Any) -> bool:
    return isinstance(axes, tuple | list) and {axis % MAP_DIMENSIONS for axis in axes} == {2, 3}


def _name(node: fx.Node) -> str:
    target: str | Callable[..., Any] = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


_SHARE = 7
"""Windows move by a seventh of their side: 32 of 224 pixels, the stride of most networks."""


class SlidingWindows:
    """Average of a network's scores over windows of an image; those at the far edges are always included.

    Args:
        scorer: maps images of the training size (B, C, h, w) to logits (B, classes).
        size: (h, w).
        stride: pixels between windows; 0: a seventh of the shorter side.
    """

    def __init__(self, scorer: Callable[[Tensor], Tensor], size: tuple[int, ...], stride: int = 0) -> None:
        self._scorer = scorer
        self._height, self._width = size
        self._stride = stride or max(1, min(size) // _SHARE)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the class scores (B, classes) of images (B, C, H, W), averaged over all windows."""
        height, width = images.shape[2:]
        places = list(product(self._starts(height, self._height), self._starts(width, self._width)))
        scores = [
            self._scorer(images[:, :, top : top + self._height, left : left + self._width])
            for top, left in places
        ]
        return torch.stack(scores).mean(0)

    def _starts(self, length: int, window: int) -> list[int]:
        last = length - window
        starts = list(range(0, last + 1, self._stride))
        return starts if starts[-1] == last else [*starts, last]
