"""A network as a chain of pieces: the positions at which it can be cut into stages, and the stages.

    images ─▶ piece 0 ─▶ piece 1 ─▶ … ─▶ logits        between two pieces: all values that later ones need

A network's forward pass is traced (`torch.fx`) into operations in their order. It can be cut behind any of them where

- all that later operations need are tensors of one row an image: those of skip connections as well, which the stages
  between carry on;
- no parameter or buffer is used on both sides;
- no later operation overwrites values that pass over the cut.

A module with a forward pass that cannot be traced, since it reads values of a tensor, stays whole: a piece is cut
around it, and a network that cannot be traced at all has a single one.

Operations that draw random numbers (dropout, stochastic depth) do so from a seed of their own, given by the microbatch
and their place in the network. So what is drawn does not depend on where the network is cut.
"""

from __future__ import annotations

import copy
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.errors import RequestError
from polyrhythm.training.model_sizes import PieceSize

_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
_RANDOM = (
    "dropout",
    "droppath",
    "drop_path",
    "stochasticdepth",
    "stochastic_depth",
    "rand",
    "bernoulli",
    "rrelu",
)
_ROWS = (2, 3)
"""Images of two trial passes: what has these numbers of rows has one an image."""

Shape = tuple[int, ...]


class _Untraceable(Exception):
    """A module's forward pass cannot be traced."""

    def __init__(self, module: nn.Module | None, error: Exception) -> None:
        super().__init__(str(error))
        self.module = module
        self.error = error


class _Tracer(fx.Tracer):
    """Traces a network, and leaves some of its modules whole."""

    def __init__(self, whole: Sequence[nn.Module]) -> None:
        super().__init__()
        self._whole = {id(module) for module in whole}
        self._inside: list[nn.Module] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._inside.append(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _Untraceable:
            raise
        except Exception as error:
            raise _Untraceable(m, error) from error
        finally:
            self._inside.pop()


class _Seeding(nn.Module):
    """Seeds what the operation after it draws; stands in a stage's graph."""

    def __init__(self, chain: Chain, place: int) -> None:
        super().__init__()
        self._chain = [chain]  # not a submodule
        self._place = place

    def forward(self) -> None:
        """Seed the generator, where a seed is set."""
        seed = self._chain[0].seed
        if seed is not None:
            seed(self._place)


@dataclass(frozen=True)
class Cut:
    """A place where the network can be cut.

    Attributes:
        behind: number of the operation that it is behind.
        values: operations with results that cross the cut, in their order.
        shapes: shapes of these, without the rows.
        dtypes: dtypes of these.
    """

    behind: int
    values: tuple[fx.Node, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of each value that goes over it, of one image."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)


class Chain:
    """A network that can be cut.

    Args:
        model: a classifier; not changed. Stages share its modules, parameters and buffers.
        image: (1, C, H, W), like the images that it will see; on the meta device where the model is.

    Attributes:
        pieces: pieces in order.
        cuts: cuts between the links, one fewer.
        seed: function that seeds the random numbers of an operation, given its number; None: not seeded.
        image_shape: shape of an image, (C, H, W).
        dtype: dtype of images.

    Raises:
        RequestError: the forward pass of the network cannot be traced, or does not map images to logits.
    """

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        self.seed: Callable[[int], None] | None = None
        self.image_shape = tuple(image.shape[1:])
        self.dtype = image.dtype
        self._model = model
        self._graph = _traced(model)
        self._operations = [
            node for node in self._graph.nodes if node.op not in ("placeholder", "get_attr", "output")
        ]
        self._place = {node: number for number, node in enumerate(self._operations)}
        results, operations = _tried(model, self._graph, image)
        self._shapes = {node: _shape_of(*results[node]) for node in results}
        self.cuts = tuple(self._cuts(results))
        self.pieces = tuple(_with_distinct_names(list(self._pieces(results, operations))))

    @property
    def graph(self) -> fx.Graph:
        """The network as it was traced."""
        return self._graph

    @property
    def operations(self) -> list[fx.Node]:
        """Operations of the network in their order; `Cut.behind` counts these."""
        return self._operations

    def layer(self, node: fx.Node) -> nn.Module:
        """Return the layer that an operation calls."""
        return self._model.get_submodule(str(node.target))

    def shape(self, node: fx.Node) -> Shape | None:
        """Return the shape of one image's part of a result; None where it has none."""
        return self._shapes.get(node)

    def names(self) -> list[str]:
        """Return the names of the pieces: of the layer that each ends in."""
        return [piece.name for piece in self.pieces]

    def stage(self, start: int, stop: int) -> Stage:
        """Return the pieces from `start` up to `stop` as a stage."""
        before = self.cuts[start - 1] if start else None
        after = self.cuts[stop - 1] if stop < len(self.pieces) else None
        first = 0 if before is None else before.behind + 1
        last = len(self._operations) if after is None else after.behind + 1
        return Stage(self._module(first, last, before, after), before, after)

    def parameters(self, start: int, stop: int) -> list[nn.Parameter]:
        """Return the parameters of the pieces from `start` up to `stop`, in the order of their use."""
        return list(self.stage(start, stop).module.parameters())

    def _module(self, first: int, last: int, before: Cut | None, after: Cut | None) -> nn.Module:
        """Return the operations from `first` up to `last` as a module from a tuple of values to one."""
        graph, root = fx.Graph(), dict[str, Any]()
        known: dict[fx.Node, fx.Node] = {}
        images = next(node for node in self._graph.nodes if node.op == "placeholder")
        for node in (images,) if before is None else before.values:
            known[node] = graph.placeholder(node.name)

        def taken(node: fx.Node) -> fx.Node:
            if node not in known:  # a parameter or buffer, where it is used first
                assert node.op == "get_attr", f"{node} is no value of this stage"
                root[str(node.target)] = _attribute(self._model, str(node.target), self._graph)
                known[node] = graph.node_copy(node)
            return known[node]

        for number in range(first, last):
            node = self._operations[number]
            if self._is_random(node):
                name = f"seeding_{number}"
                root[name] = _Seeding(self, number)
                graph.call_module(name)
            if node.op == "call_module":
                root[str(node.target)] = self._model.get_submodule(str(node.target))
            known[node] = graph.node_copy(node, taken)
        if after is None:
            output = next(node for node in self._graph.nodes if node.op == "output")
            graph.output((taken(output.args[0]),))
        else:
            graph.output(tuple(known[node] for node in after.values))
        return fx.GraphModule(root, graph)

    def _is_random(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            return any(
                isinstance(getattr(each, "p", 0.0), float) and _sounds_random(type(each).__name__)
                for each in module.modules()
            )
        return _sounds_random(getattr(node.target, "__name__", str(node.target)))

    def _cuts(self, results: dict[fx.Node, tuple[Any, ...]]) -> Iterator[Cut]:
        last_use, fragile = self._last_uses(), self._fragile(results)
        spans = self._spans()
        images = [node for node in self._graph.nodes if node.op == "placeholder"]
        for behind in range(len(self._operations) - 1):
            if any(start <= behind < stop for start, stop in spans):
                continue
            made = [*images, *self._operations[: behind + 1]]
            values = [node for node in made if last_use.get(node, -1) > behind]
            if any(self._shapes.get(node) is None for node in values):
                continue
            if not values or any(fragile.get(node, -1) > behind for node in values):
                continue
            tensors = [results[node][0] for node in values]
            yield Cut(
                behind,
                tuple(values),
                tuple(tuple(value.shape[1:]) for value in tensors),
                tuple(value.dtype for value in tensors),
            )

    def _last_uses(self) -> dict[fx.Node, int]:
        end = len(self._operations)
        return {
            node: max((self._place.get(user, end) for user in node.users), default=-1)
            for node in self._graph.nodes
            if node.op != "output"
        }

    def _fragile(self, results: dict[fx.Node, tuple[Any, ...]]) -> dict[fx.Node, int]:
        """Return, for values that are overwritten, also as views of them, by which operation at the latest."""
        sharing: dict[int, list[fx.Node]] = {}
        for node, (value, _) in results.items():
            if isinstance(value, Tensor):
                sharing.setdefault(value.untyped_storage()._cdata, []).append(node)
        found: dict[fx.Node, int] = {}
        for number, node in enumerate(self._operations):
            if self._overwrites(node):
                for taken in node.all_input_nodes[:1]:
                    value = results[taken][0]
                    found[taken] = number
                    if isinstance(value, Tensor):
                        same = sharing[value.untyped_storage()._cdata]
                        found |= dict.fromkeys(same, number)
        return found

    def _overwrites(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            return any(getattr(each, "inplace", False) is True for each in module.modules())
        if node.op == "call_method":
            return str(node.target).endswith("_") and not str(node.target).endswith("__")
        name = str(getattr(node.target, "__name__", ""))
        return bool(node.kwargs.get("inplace")) or node.target in _IN_PLACE or name.endswith("_")

    def _spans(self) -> list[tuple[int, int]]:
        """Return the first and the last use of every parameter and buffer that is used more than once."""
        uses: dict[int, list[int]] = {}
        for number, node in enumerate(self._operations):
            used: list[Tensor] = []
            if node.op == "call_module":
                module = self._model.get_submodule(str(node.target))
                used += [*module.parameters(), *module.buffers()]
            for taken in node.all_input_nodes:
                if taken.op == "get_attr":
                    value = _attribute(self._model, str(taken.target), self._graph)
                    used += [value] if isinstance(value, Tensor) else []
            for tensor in used:
                uses.setdefault(id(tensor), []).append(number)
        return [(min(places), max(places)) for places in uses.values() if len(places) > 1]

    def _pieces(
        self, results: dict[fx.Node, tuple[Any, ...]], operations: dict[fx.Node, float]
    ) -> Iterator[PieceSize]:
        start, name = 0, ""
        owned: set[int] = set()
        for cut in (*self.cuts, None):
            stop = len(self._operations) if cut is None else cut.behind + 1
            nodes = self._operations[start:stop]
            parameters = 0
            for node in nodes:
                for parameter in self._parameters_of(node):
                    if id(parameter) not in owned and parameter.requires_grad:
                        owned.add(id(parameter))
                        parameters += parameter.numel()
            kept = sum(_numbers(results[node][0]) for node in nodes)
            name = _name(nodes, name)
            yield PieceSize(
                name,
                parameters,
                sum(operations.get(node, 0.0) for node in nodes),
                () if cut is None else cut.numbers,
                kept,
                any(self._normalizes(node) for node in nodes),
            )
            start = stop

    def _normalizes(self, node: fx.Node) -> bool:
        return node.op == "call_module" and any(
            isinstance(each, _BatchNorm) for each in self._model.get_submodule(str(node.target)).modules()
        )

    def _parameters_of(self, node: fx.Node) -> Iterator[nn.Parameter]:
        if node.op == "call_module":
            yield from self._model.get_submodule(str(node.target)).parameters()
        for taken in node.all_input_nodes:
            if taken.op == "get_attr":
                value = _attribute(self._model, str(taken.target), self._graph)
                if isinstance(value, nn.Parameter):
                    yield value


class Stage:
    """Neighboring pieces of a network.

    Args:
        module: maps its values to the next ones, as tuples.
        before: the cut in front of it; None for the first stage, which takes images.
        after: the cut behind it; None for the last one, which gives logits.

    Attributes:
        module: the argument of that name.
        before: the argument of that name.
        after: the argument of that name.
    """

    def __init__(self, module: nn.Module, before: Cut | None, after: Cut | None) -> None:
        self.module = module
        self.before = before
        self.after = after


def _traced(model: nn.Module) -> fx.Graph:
    """Trace a network; modules that cannot be traced stay whole.

    Raises:
        RequestError: the network itself cannot be.
    """
    whole: list[nn.Module] = []
    training = model.training
    model.train()
    try:
        while True:
            # A table of its own, in which constants of the graph are put down.
            root = copy.copy(model)
            tracer = _Tracer(whole)
            try:
                graph = tracer.trace(root)
            except _Untraceable as found:
                if found.module is None or any(found.module is each for each in whole):
                    raise _uncut(model, found.error) from None
                whole.append(found.module)
                continue
            except Exception as error:
                raise _uncut(model, error) from None
            graph.constants = {  # type: ignore[attr-defined]
                name: value for name, value in vars(root).items() if name.startswith("_tensor_constant")
            }
            inputs = [node for node in graph.nodes if node.op == "placeholder"]
            unused = [node for node in inputs[1:] if node.users]
            if unused:
                raise RequestError(
                    f"{type(model).__name__} takes more than images ({unused[0].target}), and cannot be cut into "
                    "stages: use a network with images as its only input"
                )
            for node in inputs[1:]:
                graph.erase_node(node)
            return graph
    finally:
        model.train(training)


def _uncut(model: nn.Module, error: Exception) -> RequestError:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "torch/fx" not in frame.filename and "torch/nn/modules/module" not in frame.filename
    ]
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return RequestError(
        f"{type(model).__name__} cannot be cut into stages: its forward pass cannot be traced{place} ({reason}); "
        "make it a nn.Sequential, or move what asks for the numbers in a tensor into a module of its own"
    )


def _attribute(model: nn.Module, target: str, graph: fx.Graph) -> Any:
    constants: dict[str, Any] = getattr(graph, "constants", {})
    if target in constants:
        return constants[target]
    found: Any = model
    for name in target.split("."):
        found = getattr(found, name)
    return found


class _Probe(nn.Module):
    """Runs a graph and keeps all results, and the operations that each took."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        self.model = model
        self._graph = [graph]
        self.results: dict[fx.Node, Any] = {}
        self.operations: dict[fx.Node, float] = {}

    def forward(self, images: Tensor) -> None:
        """Run it; results are tensors on the device of the images."""
        graph = self._graph[0]
        for node in graph.nodes:
            if node.op == "placeholder":
                self.results[node] = images
                continue
            if node.op == "output":
                continue
            if node.op == "get_attr":
                value = _attribute(self.model, str(node.target), graph)
                on_device = isinstance(value, Tensor) and value.device != images.device
                self.results[node] = value.to(images.device) if on_device else value
                continue
            args = fx.node.map_arg(node.args, self.results.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, self.results.__getitem__)
            counter = FlopCounterMode(display=False)
            with counter:
                if node.op == "call_module":
                    value = self.model.get_submodule(str(node.target))(*args, **kwargs)
                elif node.op == "call_method":
                    value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    assert callable(node.target)
                    value = node.target(*args, **kwargs)
            self.results[node] = value
            self.operations[node] = float(counter.get_total_flops())


def _tried(
    model: nn.Module, graph: fx.Graph, image: Tensor
) -> tuple[dict[fx.Node, tuple[Any, ...]], dict[fx.Node, float]]:
    """Return every operation's results for two numbers of images, on shapes alone, and its work for an image."""
    found: list[dict[fx.Node, Any]] = []
    operations: dict[fx.Node, float] = {}
    modes = {module: module.training for module in model.modules()}
    # Modes are changed in place, since trial passes must not normalize by the statistics of so few.
    for module in modes:
        module.training = False
    try:
        for rows in _ROWS:
            probe = _Probe(model, graph)
            shapes = {
                name: torch.empty_like(value, device="meta")
                for name, value in (*probe.named_parameters(), *probe.named_buffers())
            }
            images = torch.empty(rows, *image.shape[1:], dtype=image.dtype, device="meta")
            with torch.no_grad():
                try:
                    torch.func.functional_call(probe, shapes, (images,))
                except Exception:  # some networks look at numbers
                    probe.results.clear()
                    if image.is_meta:
                        raise
                    probe(image.expand(rows, *image.shape[1:]))
            found.append(probe.results)
            operations = {node: work / rows for node, work in probe.operations.items()}
    except RequestError:
        raise
    except Exception as error:
        raise _uncut(model, error) from None
    finally:
        for module, training in modes.items():
            module.training = training
    first, second = found
    return {node: (first[node], second[node]) for node in first}, operations


def _shape_of(first: Any, second: Any) -> Shape | None:
    """Return the shape of one image's part of a result; None if it has none."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or not first.ndim:
        return None
    rows = (first.shape[0], second.shape[0])
    if rows != _ROWS or first.shape[1:] != second.shape[1:] or not first.is_floating_point():
        return None
    return tuple(first.shape[1:])


def _numbers(value: Any) -> int:
    """Return how many numbers of an image a result holds."""
    if isinstance(value, Tensor):
        return value.numel() // _ROWS[0]
    if isinstance(value, tuple | list):
        return sum(_numbers(each) for each in value)
    return 0


def _with_distinct_names(pieces: list[PieceSize]) -> Iterator[PieceSize]:
    """Yield pieces with distinct names: where several end in a layer, `name#1`, `name#2`, and so on."""
    uses, seen = Counter(piece.name for piece in pieces), Counter[str]()
    for piece in pieces:
        seen[piece.name] += 1
        yield replace(piece, name=f"{piece.name}#{seen[piece.name]}") if uses[piece.name] > 1 else piece


def _name(nodes: Sequence[fx.Node], before: str) -> str:
    """Return the layer that a piece ends in.

    If it computes no layer, return the module with its operations in the forward pass, or for the network's
    own operations the layer before them, if there is one.
    """
    named = [str(node.target) for node in nodes if node.op == "call_module"]
    if not named:
        named = [path for node in nodes for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
    return named[-1] if named else before or nodes[-1].name


def _sounds_random(name: str) -> bool:
    return any(word in name.lower() for word in _RANDOM)
