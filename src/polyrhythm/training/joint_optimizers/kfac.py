"""K-FAC: the natural gradient with one small matrix for each layer's inputs and one for its outputs.

J. Martens, R. Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015, arXiv
1503.05671; convolutions as in R. Grosse, J. Martens, ICML 2016, arXiv 1602.01407; shared out over workers as in K.
Osawa and others, CVPR 2019, arXiv 1811.12019, and J. G. Pauloski and others, SC 2020, arXiv 2007.00784.

    A = E sum_t a_t a_t^T        a_t: a layer's input at place t, and 1 for its bias        (factors: running means)
    G = E mean_t s_t s_t^T       s_t: derivative of the log-likelihood by the layer's output
    P = Q_G ((Q_G^T W' Q_A) / (v_G v_A^T + l)) Q_A^T      A = Q_A diag(v_A) Q_A^T, same for G; W' the mean gradient
    m <- momentum m + c P,  W <- W - lr m                 c = min(1, sqrt(k / sum lr^2 P.W'))

l is `damping`, k is `clip`. A linear layer has one place, a convolution those of its output. Each worker adds up the
factors of its own batch; they are averaged over all workers in one exchange, as one batch of all would give them. Then
each eigendecomposition is made by one worker only, so that all have about as many operations, and passed on to the
others.

`fisher` selects the labels for the derivative s: `sampled` from the network's own probabilities, as in the
paper;
`exact`, their expectation, with a backward pass for each class; `empirical`, the true labels, which is no longer the
curvature where the network is right. Departures: damping is added to the products of
eigenvalues, as in Pauloski, so that it is exactly l I, where the paper damps both factors; neither damping nor
momentum adapts. Parameters of other layers (batch norm, grouped convolutions, and those with a factor beyond `largest`)
take their plain gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.joint_optimizer import Joint, JointOptimizer, Pass, averaged
from polyrhythm.training.quantities import Count, Decay, NonNegative, Positive

Fisher = Literal["sampled", "exact", "empirical"]
_BACKWARD_SHARE = 2 / 3
"""Share of a step's time: a backward pass."""


@dataclass(eq=False)
class Layer:
    """A layer with two factors.

    Attributes:
        module: a linear layer or a convolution.
        weight: matrix of the layer; `state[weight]` has the kept factors.
        bias: trained as one more column of the matrix; None: there is none.
        inputs: sum over this worker's images of a a^T, `(n, n)`; None: nothing was observed in this step.
        outputs: sum over this worker's images of s s^T, `(m, m)`.
    """

    module: nn.Linear | nn.Conv2d
    weight: nn.Parameter
    bias: nn.Parameter | None
    inputs: Tensor | None = None
    outputs: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the factors of its inputs and outputs."""
        return self.weight[0].numel() + (self.bias is not None), len(self.weight)

    def rows(self, images: Tensor) -> Tensor:
        """Return its inputs at all places, `(B T, n)`."""
        if isinstance(self.module, nn.Conv2d):
            images = _windows(images, self.module)
        else:
            images = images.reshape(-1, images.shape[-1])
        values = self.weight[0].numel()
        # One copy instead of three (unfolded, in rows, with the ones next to it).
        found = self.weight.new_empty(*images.shape[: images.ndim - self.weight.ndim + 1], self.sizes[0])
        found[..., :values].unflatten(-1, self.weight.shape[1:]).copy_(images)
        found[..., values:] = 1
        return found.view(-1, self.sizes[0])

    def matrix(self) -> Tensor:
        """Return its mean gradient, `(m, n)`."""
        assert self.weight.grad is not None
        found = self.weight.grad.reshape(len(self.weight), -1)
        if self.bias is None:
            return found
        assert self.bias.grad is not None
        return torch.cat([found, self.bias.grad.unsqueeze(1)], 1)


@dataclass(frozen=True)
class Observation:
    """Observation of a layer in a forward pass.

    Attributes:
        layer: the layer.
        images: inputs of the layer.
        edge: edge of its outputs in the graph, before any later change in place.
        places: T.
    """

    layer: Layer
    images: Tensor = field(repr=False)
    edge: GradientEdge
    places: int


def _windows(images: Tensor, module: nn.Conv2d) -> Tensor:
    """Return the input patches of a convolution, a view, `(B, T_rows, T_columns, C, rows, columns)`."""
    assert not isinstance(module.padding, str), "else it has no factors"
    rows, columns = module.padding
    found = functional.pad(images, (columns, columns, rows, rows)).contiguous()
    for axis, (size, step, apart) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), 2
    ):
        found = found.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
    return found.permute(0, 2, 3, 1, 4, 5)


_BLOCK = 128
"""Columns at a time: of 801 columns and 4,096 rows, a thread of a CPU takes 22 ms with it and 35 without."""


def gram(rows: Tensor) -> Tensor:
    """Return `rows.T @ rows`, symmetric bit for bit; of tall matrices only upper blocks are computed."""
    count, size = rows.shape
    if count <= size or size <= 2 * _BLOCK:
        found = rows.T @ rows
    else:
        found = rows.new_empty(size, size)
        for begin in range(0, size, _BLOCK):
            found[begin : begin + _BLOCK, begin:] = rows[:, begin : begin + _BLOCK].T @ rows[:, begin:]
    return (
        found.triu() + found.triu(1).T
    )  # BLAS products of a matrix with itself need not be symmetric bit for bit


def layers_of(model: nn.Module, trained: list[nn.Parameter], largest: int) -> list[Layer]:
    """Return the layers with factors and trained weights, in the model's order.

    Args:
        model: the network.
        trained: trained parameters.
        largest: rows of a factor, at most.
    """
    known = {id(each): each for each in trained}
    uses = [id(each) for module in model.modules() for each in module.parameters(recurse=False)]
    found = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if module.groups > 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
                continue
        elif not isinstance(module, nn.Linear):
            continue
        # A weight that two layers share has no factors of one of them.
        if id(module.weight) not in known or uses.count(id(module.weight)) > 1:
            continue
        bias = None if module.bias is None else known.get(id(module.bias))
        layer = Layer(module, known[id(module.weight)], bias)
        if max(layer.sizes) <= largest:
            found.append(layer)
    return found


def shared_out(sizes: list[int], workers: int) -> list[int]:
    """Return the worker that decomposes each matrix: the largest first, to the worker with the least work.

    Args:
        sizes: rows of each.
        workers: number of workers.
    """
    work = [0] * workers
    owners = [0] * len(sizes)
    for position in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        owner = min(range(workers), key=lambda each: (work[each], each))
        owners[position] = owner
        work[owner] += sizes[position] ** 3
    return owners


class KroneckerOptimizer(JointOptimizer):
    """K-FAC by the module's rule."""

    options: ClassVar = {
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "damping": 0.03,
        "decay": 0.95,
        "factor_every": 1,
        "inverse_every": 10,
        "clip": 0.001,
        "fisher": "sampled",
        "largest": 2048,
    }

    def tie(self, model: nn.Module) -> None:
        self._group = self.param_groups[0]
        self._rates = [group["lr"] for group in self.param_groups]
        trained = [each for group in self.param_groups for each in group["params"]]
        self._layers = layers_of(model, trained, self._group["largest"])
        self._recorded: list[Observation] = []
        self._records, self._images, self._number, self._backward_passes = False, 0, 0, 0
        for layer in self._layers:
            layer.module.register_forward_hook(self._hook_of(layer))

    def _hook_of(self, layer: Layer) -> Any:
        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self._records and output.requires_grad:
                # All of its dimensions but the first and the features are places.
                features = output.shape[1] if isinstance(module, nn.Conv2d) else output.shape[-1]
                places = output[0].numel() // features
                edge = get_gradient_edge(output)
                self._recorded.append(Observation(layer, inputs[0].detach(), edge, places))

        return record

    def begin(self, number: int, seed: int) -> None:
        self._number = number
        every = self._group["factor_every"]
        known = not self._layers or "inputs" in self.state[self._layers[0].weight]
        self._records = bool(self._layers) and (number % every == 0 or not known)
        self._recorded, self._images, self._backward_passes = [], 0, 0
        for layer in self._layers:
            layer.inputs = layer.outputs = None
        self._generator_seed = seed

    def observe(self, scores: Tensor, batch: Pass) -> None:
        if not self._records:
            return
        records, self._recorded = self._recorded, []
        self._images += batch.images
        directions = self._directions(scores, batch)
        self._backward_passes = len(directions)
        for direction in directions:
            found = torch.autograd.grad(
                [scores], [each.edge for each in records], [direction], retain_graph=True, allow_unused=True
            )
            with torch.no_grad():
                for each, gradient in zip(records, found, strict=True):
                    if gradient is not None:
                        self._add_output(each, gradient)
        with torch.no_grad():
            for each in records:
                rows = each.layer.rows(each.images)
                each.layer.inputs = _plus(each.layer.inputs, gram(rows))

    def _add_output(self, records: Observation, gradient: Tensor) -> None:
        layer = records.layer
        if isinstance(layer.module, nn.Conv2d):
            gradient = gradient.permute(0, 2, 3, 1)
        rows = gradient.reshape(-1, gradient.shape[-1]).to(layer.weight.dtype)
        layer.outputs = _plus(layer.outputs, gram(rows) / records.places)

    def _directions(self, scores: Tensor, batch: Pass) -> list[Tensor]:
        """Return the derivatives by the outputs, (B, …, K) each, with squares that add up to the Fisher matrix."""
        fisher: Fisher = self._group["fisher"]
        if fisher == "empirical":
            with torch.enable_grad():
                leaf = scores.detach().requires_grad_()
                (found,) = torch.autograd.grad(batch.loss(leaf), leaf)
            return [found * batch.images]
        probabilities = scores.detach().softmax(-1)
        classes = probabilities.shape[-1]
        if fisher == "exact":
            eye = torch.eye(classes, dtype=scores.dtype, device=scores.device)
            return [
                probabilities[..., number : number + 1].sqrt() * (probabilities - eye[number])
                for number in range(classes)
            ]
        generator = torch.Generator(scores.device).manual_seed(self._generator_seed)
        self._generator_seed += 1  # for the next piece of the batch
        drawn = torch.multinomial(probabilities.float().view(-1, classes), 1, generator=generator)
        hot = functional.one_hot(drawn.view(probabilities.shape[:-1]), classes)
        return [probabilities - hot.to(probabilities.dtype)]

    def update(self, flat: FlatParameters, rate: float) -> None:
        factors = self._factors() if self._records else None
        self._records = False
        bases = self._bases(factors)
        # From here on nothing can fail any more.
        for layer, found in zip(self._layers, factors or (), strict=factors is not None):
            state = self.state[layer.weight]
            state["inputs"], state["outputs"] = found
            state["factors"] = state.get("factors", 0) + 1
        for layer, basis in zip(self._layers, bases or (), strict=bases is not None):
            self.state[layer.weight] |= basis
        self._move(rate)

    def _factors(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return every layer's running means, including the present step; None if no worker had an image."""
        sums: list[Tensor] = []
        for layer in self._layers:
            for size, total in zip(layer.sizes, (layer.inputs, layer.outputs), strict=True):
                whole = layer.weight.new_zeros(size, size) if total is None else total
                # As a triangle: the matrix is symmetric.
                sums.append(whole.view(-1).index_select(0, _triangle(size, whole.device)[0]))
        if self._backward_passes:
            self.pass_time(_BACKWARD_SHARE * self._backward_passes)
        means, count = averaged(self.workers, sums, self._images)
        if not count:
            return None
        found = []
        for layer, inputs, outputs in zip(self._layers, means[::2], means[1::2], strict=True):
            state = self.state[layer.weight]
            # The mean of all steps at first, so that the zeros before them do not count.
            kept = min(1 - 1 / (state.get("factors", 0) + 1), self._group["decay"])
            pair = []
            for size, key, mean in zip(layer.sizes, ("inputs", "outputs"), (inputs, outputs), strict=True):
                new = _symmetric(mean, size)
                pair.append(new if kept == 0 else new.lerp_(state[key], kept))
            found.append((pair[0], pair[1]))
        return found

    def _bases(self, factors: list[tuple[Tensor, Tensor]] | None) -> list[dict[str, Tensor]] | None:
        """Return every layer's eigenvalues and eigenvectors, if they are due; each was found by one worker."""
        first = self.state[self._layers[0].weight] if self._layers else {}
        known = "inputs_basis" in first
        if not self._layers or not (factors or "inputs" in first):
            return None
        if known and self._number % self._group["inverse_every"]:
            return None
        matrices = []
        for position, layer in enumerate(self._layers):
            state = self.state[layer.weight]
            pair = (state["inputs"], state["outputs"]) if factors is None else factors[position]
            matrices += list(pair)
        owners = shared_out([len(matrix) for matrix in matrices], self.workers.size)
        pieces: list[Tensor] = [matrix.new_empty(0) for matrix in matrices]
        for rank in range(self.workers.size):
            own = [position for position, owner in enumerate(owners) if owner == rank]
            if not own:
                continue
            sizes = [len(matrices[position]) ** 2 + len(matrices[position]) for position in own]
            if rank == self.workers.rank:
                whole = torch.cat([_decomposed(matrices[position]) for position in own])
            else:
                whole = matrices[0].new_empty(sum(sizes))
            self.workers.broadcast(whole, rank)
            for position, piece in zip(own, whole.split(sizes), strict=True):
                pieces[position] = piece
        found = []
        for inputs, outputs in zip(pieces[::2], pieces[1::2], strict=True):
            basis = {}
            for side, piece in (("inputs", inputs), ("outputs", outputs)):
                size = int((sqrt(4 * len(piece) + 1) - 1) / 2 + 0.5)
                basis[f"{side}_values"] = piece[:size].clone()
                basis[f"{side}_basis"] = piece[size:].view(size, size).clone()
            found.append(basis)
        return found

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        """Change the parameters and their momenta."""
        first = self._rates[0]
        decays, rates = {}, {}
        for group, usual in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate if usual == first else rate * usual / first
            for parameter in group["params"]:
                decays[parameter], rates[parameter] = group["weight_decay"], group["lr"]
        directions: dict[nn.Parameter, Tensor] = {}
        total = 0.0
        for layer in self._layers:
            state = self.state[layer.weight]
            if "inputs_basis" not in state:
                continue
            own = layer.matrix().clone()
            own[:, : layer.weight[0].numel()] += decays[layer.weight] * layer.weight.reshape(
                len(layer.weight), -1
            )
            if layer.bias is not None:
                own[:, -1] += decays[layer.bias] * layer.bias
            natural = preconditioned(own, state, self._group["damping"])
            numbers = layer.weight[0].numel()
            directions[layer.weight] = natural[:, :numbers].reshape(layer.weight.shape)
            total += rates[layer.weight] ** 2 * float((natural[:, :numbers] * own[:, :numbers]).sum())
            if layer.bias is not None:
                directions[layer.bias] = natural[:, -1]
                total += rates[layer.bias] ** 2 * float((natural[:, -1] * own[:, -1]).sum())
        clip = self._group["clip"]
        scale = min(1.0, sqrt(clip / total)) if clip and total > 0 else 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter in directions:
                    direction = directions[parameter] * scale
                else:
                    direction = parameter.grad.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if group["momentum"]:
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = direction.clone(memory_format=torch.contiguous_format)
                    else:
                        state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                    direction = state["momentum_buffer"]
                parameter.add_(direction, alpha=-group["lr"])


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


@lru_cache(maxsize=64)
def _triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places of a matrix's upper triangle, `(t,)`, and of each number in that, `(size * size,)`."""
    rows, columns = torch.triu_indices(size, size, dtype=torch.int32, device=device)
    places = torch.empty(size, size, dtype=torch.int32, device=device)
    places[rows, columns] = places[columns, rows] = torch.arange(len(rows), dtype=torch.int32, device=device)
    return rows * size + columns, places.view(-1)


def _symmetric(triangle: Tensor, size: int) -> Tensor:
    """Return the matrix, `(size, size)`, with this upper triangle."""
    return triangle.index_select(0, _triangle(size, triangle.device)[1]).view(size, size)


def _decomposed(matrix: Tensor) -> Tensor:
    """Return the eigenvalues and then the eigenvectors of a symmetric matrix, in a row."""
    # Single precision does not always converge where eigenvalues are many powers of ten apart.
    values, basis = torch.linalg.eigh(matrix.double())
    return torch.cat([values.clamp_min(0), basis.reshape(-1)]).to(matrix.dtype)


def preconditioned(gradient: Tensor, state: dict[str, Any], damping: float) -> Tensor:
    """Return `(G x A + damping I)^-1` times a layer's gradient, `(m, n)`.

    Args:
        gradient: `(m, n)`, not changed.
        state: state of the layer: `inputs_basis` `(n, n)`, `inputs_values` `(n,)`, and the same of its outputs.
        damping: above 0.
    """
    inputs, outputs = state["inputs_basis"], state["outputs_basis"]
    turned = outputs.T @ gradient @ inputs
    turned /= torch.outer(state["outputs_values"], state["inputs_values"]) + damping
    found: Tensor = outputs @ turned @ inputs.T
    return found


class KFAC(Joint):
    """Keys of K-FAC.

    Attributes:
        momentum: share of the buffer that is kept at each step.
        damping: constant added to every eigenvalue of the curvature.
        decay: share of the old factors that is kept at each renewal.
        factor_every: steps from one look at the factors to the next.
        inverse_every: steps from one eigendecomposition to the next.
        clip: largest change of the network's outputs by a step (KL divergence, by the quadratic model); 0:
            any.
        fisher: labels of the outputs' derivatives: `sampled`, `exact` or `empirical`.
        largest: rows of a factor, at most, for a layer to have some.
    """

    kind: ClassVar = KroneckerOptimizer
    layerwise: ClassVar[bool] = True

    lr: Positive = 0.01
    momentum: Decay = 0.9
    damping: Positive = 0.03
    decay: Decay = 0.95
    factor_every: Count = 1
    inverse_every: Count = 10
    clip: NonNegative = 0.001
    fisher: Fisher = "sampled"
    largest: Count = 2048
