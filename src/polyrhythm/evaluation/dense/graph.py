"""A network as a graph: what maps maps to maps is one node, and every node knows its shape at training size."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

MAP_DIMENSIONS = 4


def traced(model: nn.Module, probe: Tensor) -> fx.GraphModule:
    """Gives a network as a graph, whose nodes have their shapes in `meta["shape"]`; None for what is no tensor.

    Args:
        model: in its evaluation mode.
        probe: (B, C, H, W), pictures of its training size.
    """
    if isinstance(model, nn.Linear | nn.Conv2d):
        model = nn.Sequential(model)
    graph = _HeadTracer(_feature_modules(model, probe)).trace(model)
    found = fx.GraphModule(model, graph)
    _Shapes(found).run(probe)
    return found


class _HeadTracer(fx.Tracer):
    """Looks into the modules after the last feature map only; what maps maps to maps stays a whole."""

    def __init__(self, whole: frozenset[str]) -> None:
        super().__init__()
        self._whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._whole or super().is_leaf_module(m, module_qualified_name)


def _feature_modules(model: nn.Module, probe: Tensor) -> frozenset[str]:
    """Names the modules that turn one map into another of more than one place."""
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
    """Notes the shape that every node has at training size."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        n.meta["shape"] = tuple(made.shape) if isinstance(made, Tensor) else None
        return made
