"""A network's graph, rewritten from its first flattening on: what was flat becomes a map of one place or more."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from polyrhythm.evaluation.dense.graph import MAP_DIMENSIONS
from polyrhythm.evaluation.dense.layers import as_batch_norm_2d, as_convolution
from polyrhythm.evaluation.dense.network import NotConvertible

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Rewrites a network from its first flattening on.

    Args:
        traced: as `graph.traced` gives it; changed in place.

    Attributes:
        windows: of every flat value, the sides of the map that one place of it stands for, (1, 1) once a layer
            has read it.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        self._traced = traced
        self.windows: dict[fx.Node, tuple[int, int]] = {}

    def converted(self) -> nn.Module:
        """Gives the network of convolutions.

        Raises:
            NotConvertible: it has something that is not known to be possible.
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
                raise NotConvertible(f"it pools to {node.meta['shape'][2]} places a side, whatever comes in")
            node.replace_all_uses_with(given[0])  # nothing at training size, no windows on a larger picture

    def _pool_windows(self, node: fx.Node, source: fx.Node) -> None:
        """Has a mean over the whole map be one over every window."""
        height, width = source.meta["shape"][2:]
        flat = len(node.meta["shape"]) == 2
        pool = self._add(nn.AvgPool2d((height, width), stride=1), node, source)
        if flat:
            self.windows[pool] = (1, 1)

    def _keep_map(self, node: fx.Node, source: fx.Node) -> None:
        """Has a flat vector stay a map, in a node of its own, since others may read the map itself."""
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
        """Whether a node averages a map to one place."""
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
        """Puts a new module in a node's place."""
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
