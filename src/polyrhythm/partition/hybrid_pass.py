"""Hybrid model and data parallelism: a joint forward and backward pass of K workers.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section
4; Wu, Yan, Shan, Dang, Sun, "Deep Image", 2015, arXiv 1501.02876, section 3.2, has the same split.

    trunk gradient of worker i = d(w_i L_i)/d trunk      to be summed over the workers
    head gradient, slice s     = d(sum_i w_i L_i)/d s    complete on worker s: not to be summed again

L_i is the mean loss of worker i's examples, w_i their weight; dividing both by sum_i w_i yields the gradients
of the mean over all examples.

    trunk ─▶ ( examples ─▶ head forward ─▶ logits ─▶ loss ─▶ head backward ─▶ gradients of examples ) per round ─▶ trunk
              └─ those of the next round are sent before this one is computed

The scheme determines which examples the head sees together, round by round:

    a    one round:  all b examples of all K workers
    b    K rounds:   all b examples of worker k in round k
    c    K rounds:   examples b r/K ... b (r+1)/K of every worker in round r

The head's gradients are those of all rounds together, so all schemes yield those of one large batch.

Every worker computes a slice of the neurons of each layer of the head:

    forward    y_s = f(x W_s' + b_s)  on worker s;   x of the next layer = (y_0 | y_1 | … )       for all examples
    backward   dW_s = dz_s' x         on worker s;   dx = sum_s dz_s W_s, each worker its own columns of it

W_s are the rows of W that belong to the slice, z_s the argument of f. Of a tree of networks every worker computes some
branches whole, in place of slices (`branches.py`). The owners of the examples receive their logits
and provide the gradients of these. Autograd works only within a layer, so no worker ever waits for another inside it.

A dry run (`DryRunPass`) sends the messages of a pass without its numbers, for networks that are not computed. Every
message has the size and the place of its counterpart in `HybridPass`: examples that are sent one round early, outputs
of hidden layers, logits, and the gradients of all three on their way back.

Departure from the papers: the head is not updated after every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.partition.activations import (
    EXAMPLES,
    LAYERS,
    PICTURES,
    Activations,
    added,
    neurons,
    others,
)
from polyrhythm.partition.branches import Branches, OwnedBranches
from polyrhythm.partition.cut import Cut, Layer
from polyrhythm.partition.divided_trunk import DividedTrunk, TrunkPass
from polyrhythm.partition.held_rows import HeldRows
from polyrhythm.training.forward_pass import by_running_statistics
from polyrhythm.training.model_sizes import Exchange

Scheme = Literal["a", "b", "c"]


def rounds(scheme: Scheme, workers: int) -> int:
    """Return the number of rounds of a step."""
    return 1 if scheme == "a" else workers


def sends(scheme: Scheme, worker: int, number: int) -> bool:
    """Whether a worker has examples in a round, as far as this is known without its batch."""
    return scheme != "b" or worker == number


def place(scheme: Scheme, batch: int, workers: int, number: int) -> slice:
    """Return which examples of its batch a worker sends in a round.

    Args:
        scheme: a, b or c.
        batch: the worker's examples in the step.
        workers: number of workers.
        number: number of the round.
    """
    if scheme == "c":
        return slice(batch * number // workers, batch * (number + 1) // workers)
    return slice(0, batch)


Loss = Callable[[Tensor, slice], Tensor]
"""Maps logits (R, classes) and the positions of their examples in the batch to their mean loss, ()."""


class Pass(Protocol):
    """Computes one worker's passes together with the others; all must call it."""

    def run(self, images: Tensor, loss: Loss, weight: float = 1.0) -> float:
        """Compute a pass; see `HybridPass.run`."""

    def complete(self) -> None:
        """Complete the state of layers that one worker owns, parameters excluded, on all workers."""


class HybridPass:
    """One worker's passes. All workers must call it equally often, with the same network.

    Args:
        parts: parts of the network.
        group: the workers.
        scheme: examples that the head sees together, and layers of the trunk that are cut.
        divided: layers of the trunk that are cut; None: every worker has them all.
        held: rows of divided layers that this worker has; None: it has all layers whole.
    """

    def __init__(
        self,
        parts: Cut | Branches,
        group: Communicator,
        scheme: Scheme,
        divided: DividedTrunk | None = None,
        held: HeldRows | None = None,
    ) -> None:
        held = HeldRows(parts.like) if held is None else held
        self._parts = parts
        self._like = held.like
        self._scheme = scheme
        self._activations = Activations(group)
        self._head = (
            OwnedBranches(parts, self._activations)
            if isinstance(parts, Branches)
            else ShardedLayers(parts.layers, self._activations, held, wants_inputs=parts.trains_trunk)
        )
        self._divided = divided
        if divided is not None:
            self._trunk = TrunkPass(divided, self._activations, held)

    @property
    def received_bytes(self) -> int:
        """Bytes of activations and their gradients that this worker has received."""
        return self._activations.received_bytes

    @property
    def places(self) -> list[slice]:
        """This worker's neurons of each layer of the head, or its branches."""
        return self._head.places

    def run(self, images: Tensor, loss: Loss, weight: float = 1.0) -> float:
        """Add to the gradients of the trunk and of this worker's slices of the head, in place.

        Args:
            images: (B, C, H, W); a worker without any takes part in the others' head.
            loss: loss of this worker's examples; its value for some of them must not depend on the rest.
            weight: w_i.

        Returns:
            The mean loss of this worker's examples; 0 without any.
        """
        if self._divided is not None:
            return self._run_divided(self._divided, images, loss, weight)
        features = self._features(images)
        gradients, value = torch.zeros_like(features), 0.0
        setting_out = self._send(features, 0)
        for number in range(rounds(self._scheme, self._activations.size)):
            under_way, setting_out = setting_out, self._send(features, number + 1)
            mine = self._place(features, number)
            examples = [self._examples(features, number, source) for source in range(self._activations.size)]
            value += self._round(examples, mine, gradients, (loss, weight))
            # Only now: the sends of this round overlap with its computation.
            self._activations.finish(under_way)
        if features.requires_grad:
            features.backward(gradients)
        return value

    def complete(self) -> None:
        """Complete the running statistics on all workers, which must all call it."""
        if self._divided is not None:
            self._trunk.complete()

    def _run_divided(self, divided: DividedTrunk, images: Tensor, loss: Loss, weight: float) -> float:
        """Run the rounds with the trunk's layers in them, since workers compute these together, too."""
        rank, size = self._activations.rank, self._activations.size
        like = self._like
        images = images.to(like.dtype)
        gradients = like.new_zeros(len(images), self._parts.features)
        value, count = 0.0, rounds(self._scheme, size)
        setting_out = self._start(images, 0)
        for number in range(count):
            under_way, setting_out = setting_out, self._start(images, number + 1)
            mine = self._place(images, number)
            sending = [sends(self._scheme, source, number) for source in range(size)]
            leaves = self._trunk.forward(images[mine], sending)
            alone = by_running_statistics(divided.rest) if mine.stop - mine.start == 1 else nullcontext()
            with torch.enable_grad(), alone:
                features = divided.rest(*leaves)[0] if mine.start < mine.stop else gradients[:0]
            leaving = self._activations.start(features) if sending[rank] else []
            examples = [
                features.detach()
                if source == rank
                else self._activations.examples(source, gradients)
                if sent
                else gradients[:0]
                for source, sent in enumerate(sending)
            ]
            if any(map(len, examples)):
                value += self._round(examples, mine, gradients, (loss, weight))
            if features.requires_grad:
                features.backward(gradients[mine])
            self._trunk.backward(
                [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            )
            self._activations.finish([*under_way, *leaving])
        return value

    def _start(self, images: Tensor, number: int) -> list[Handle]:
        """Start to send a round's images, if there is such a round and this worker has some in it."""
        rank, size = self._activations.rank, self._activations.size
        if number >= rounds(self._scheme, size) or not sends(self._scheme, rank, number):
            return []
        return self._trunk.start(images[self._place(images, number)])

    def _features(self, images: Tensor) -> Tensor:
        if len(images):
            with torch.enable_grad():
                features: Tensor = self._parts.trunk(images)
            return features
        like = self._like
        return torch.zeros(0, self._parts.features, dtype=like.dtype, device=like.device)

    def _send(self, features: Tensor, number: int) -> list[Handle]:
        rank, size = self._activations.rank, self._activations.size
        if number >= rounds(self._scheme, size) or not sends(self._scheme, rank, number):
            return []
        return self._activations.start(features[self._place(features, number)])

    def _place(self, features: Tensor, number: int) -> slice:
        rank, size = self._activations.rank, self._activations.size
        if not sends(self._scheme, rank, number):
            return slice(0, 0)
        return place(self._scheme, len(features), size, number)

    def _examples(self, features: Tensor, number: int, source: int) -> Tensor:
        if source == self._activations.rank:
            return features.detach()[self._place(features, number)]
        if not sends(self._scheme, source, number):
            return features.detach()[:0]
        return self._activations.examples(source, features)

    def _round(
        self, examples: Sequence[Tensor], mine: slice, gradients: Tensor, of_loss: tuple[Loss, float]
    ) -> float:
        """Pass examples through the head and back; fill this worker's `gradients`, and return its part of its loss."""
        counts = [len(part) for part in examples]
        logits = self._head.forward(examples[0] if len(examples) == 1 else torch.cat(list(examples)), counts)
        share = (mine.stop - mine.start) / len(gradients) if len(gradients) else 0.0
        value, gradient = _loss_of(logits, mine, share, of_loss)
        partial = self._head.backward(gradient, counts)
        if partial is not None:
            own = [(counts[self._activations.rank], gradients.shape[1])] * len(counts)
            gradients[mine] = added(self._activations.swap(partial.split(counts), own))
        return value


def _loss_of(logits: Tensor, mine: slice, share: float, of_loss: tuple[Loss, float]) -> tuple[float, Tensor]:
    """Return `share` of some examples' loss, and the gradient of that share of the weighted loss by their logits."""
    if share == 0:
        return 0.0, torch.zeros_like(logits)
    loss, weight = of_loss
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf, mine)
        (gradient,) = torch.autograd.grad(value * (weight * share), leaf)
    return float(value.detach()) * share, gradient


@dataclass(frozen=True)
class _Call:
    """State for a layer's backward pass.

    Attributes:
        inputs: (R, A), inputs of the layer.
        slices: weight and bias, if any, each with this worker's rows in it.
        sums: (R, n_s), products of weights and inputs, with the bias.
        outputs: (R, n_s), values of the elementwise modules for these.
    """

    inputs: Tensor
    slices: list[tuple[Tensor, slice]]
    sums: Tensor
    outputs: Tensor


class ShardedLayers:
    """One worker's slices of a head.

    Args:
        layers: the layers of the head; gradients are added to this worker's rows only.
        activations: exchange with the others.
        held: rows of the layers that this worker has.
        wants_inputs: whether the gradient of the first layer's inputs is needed.
    """

    def __init__(
        self, layers: Sequence[Layer], activations: Activations, held: HeldRows, *, wants_inputs: bool
    ) -> None:
        self._layers = layers
        self._activations = activations
        self._held = held
        self._wants_inputs = wants_inputs
        workers = activations.size
        self._places = [neurons(layer.linear.out_features, workers) for layer in layers]
        self._calls: list[_Call] = []

    @property
    def places(self) -> list[slice]:
        """This worker's neurons of each layer."""
        return [places[self._activations.rank] for places in self._places]

    def forward(self, inputs: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the logits of this worker's own examples.

        Args:
            inputs: (sum of counts, A), the examples of all workers, in rank order.
            counts: number of each worker's examples.

        Returns:
            (counts[rank], classes).
        """
        rank, rows = self._activations.rank, sum(counts)
        self._calls = []
        for number, layer in enumerate(self._layers):
            call = self._call(number, layer, inputs)
            self._calls.append(call)
            if number + 1 == len(self._layers):
                parts, height = list(call.outputs.split(list(counts))), counts[rank]
            else:
                parts, height = [call.outputs] * len(counts), rows
            shapes = [(height, width) for width in self._widths(number)]
            inputs = _joined(self._activations.swap(parts, shapes), dim=1)
        return inputs

    def backward(self, gradient: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Add to the gradients of this worker's slices, in place, and return its share of the gradient of the inputs.

        Args:
            gradient: (counts[rank], classes), of the logits that `forward` returned.
            counts: counts given to `forward`.

        Returns:
            (sum of counts, A): the contribution of this worker's neurons, to be summed over the workers; None if it is
            not needed.
        """
        rank, rows = self._activations.rank, sum(counts)
        widths = self._widths(len(self._layers) - 1)
        shapes = [(count, widths[rank]) for count in counts]
        gradient = _joined(self._activations.swap(gradient.split(widths, dim=1), shapes), dim=0)
        partial: Tensor | None = None
        for number in reversed(range(len(self._layers))):
            wants_inputs = self._wants_inputs or number > 0
            alone = len(counts) == 1
            partial = _backward(self._calls[number], gradient, wants_inputs=wants_inputs, alone=alone)
            if number:
                assert partial is not None, "all layers but the first want to know of their inputs"
                widths = self._widths(number - 1)
                shapes = [(rows, widths[rank])] * len(counts)
                gradient = added(self._activations.swap(partial.split(widths, dim=1), shapes))
        self._calls = []
        return partial

    def _call(self, number: int, layer: Layer, inputs: Tensor) -> _Call:
        place = self._places[number][self._activations.rank]
        linear, inputs = layer.linear, inputs.detach()
        parameters = [each for each in (linear.weight, linear.bias) if each is not None]
        slices = [self._held.of(parameter, place) for parameter in parameters]
        sums = functional.linear(inputs, *[parameter.detach()[rows] for parameter, rows in slices])
        sums.requires_grad_()
        with torch.enable_grad():
            outputs = layer.after(sums.clone())  # modules may work in place
        return _Call(inputs, slices, sums, outputs)

    def _widths(self, number: int) -> list[int]:
        return [place.stop - place.start for place in self._places[number]]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _backward(call: _Call, gradient: Tensor, *, wants_inputs: bool, alone: bool) -> Tensor | None:
    """Add to the gradients of a slice's parameters; return that of the inputs, if it is wanted.

    Workers that share a layer compute them into the gradients, since a product apart is as large as the slice. One
    worker `alone` rounds as autograd does.
    """
    if not (wants_inputs or any(parameter.requires_grad for parameter, _ in call.slices)):
        return None
    (inner,) = torch.autograd.grad(call.outputs, call.sums, gradient)
    for parameter, rows in call.slices:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part = parameter.grad[rows]
            if part.dim() == 1:
                part += inner.sum(0)
            elif alone:
                part += inner.t().mm(call.inputs)
            else:
                part.addmm_(inner.t(), call.inputs)
    weight, rows = call.slices[0]
    return inner.mm(weight.detach()[rows]) if wants_inputs else None


@dataclass(frozen=True)
class HeadSizes:
    """Sizes that determine the messages.

    Attributes:
        features: features of an example: A.
        widths: neurons of each layer.
        trains_trunk: whether gradients of examples are needed.
        number: a tensor with the dtype and device of the messages.
        stands_for: number of values that each element of a message stands for.
        exchanges: exchanges of the layers before the head, where they are cut.
    """

    features: int
    widths: tuple[int, ...]
    trains_trunk: bool
    number: Tensor
    stands_for: float = 1.0
    exchanges: tuple[Exchange, ...] = ()


class DryRunPass:
    """One worker's passes in a dry run. All workers must call it equally often.

    Args:
        sizes: sizes of the head.
        group: the workers.
        scheme: examples that the head sees together.
    """

    def __init__(self, sizes: HeadSizes, group: Communicator, scheme: Scheme) -> None:
        self._sizes = sizes
        self._scheme = scheme
        self._rank, self._size = group.rank, group.size
        self._group = group.subgroup("activations", range(group.size)) if group.size > 1 else group
        self._widths = [
            [span.stop - span.start for span in neurons(each, group.size)] for each in sizes.widths
        ]

    def run(self, images: Tensor, loss: Loss, weight: float = 1.0) -> float:
        """Send and receive the messages for as many examples as there are rows in `images`."""
        batch = len(images)
        if not self._widths:
            return 0.0
        if self._sizes.exchanges:
            return self._run_divided(batch)
        setting_out = self._send(batch, 0)
        for number in range(rounds(self._scheme, self._size)):
            under_way, setting_out = setting_out, self._send(batch, number + 1)
            self._round([self._rows(batch, number, source) for source in range(self._size)])
            for handle in under_way:
                handle.wait()
        return 0.0

    def complete(self) -> None:
        """Exchange nothing: running statistics are no numbers of a dry run."""

    def _run_divided(self, batch: int) -> float:
        rank, size = self._rank, self._size
        images, *others_of_pass = self._sizes.exchanges
        head = next(number for number, each in enumerate(others_of_pass) if each.kind == "head")

        def start(number: int) -> list[Handle]:
            if number >= rounds(self._scheme, size) or not sends(self._scheme, rank, number):
                return []
            span = place(self._scheme, batch, size, number)
            rows = span.stop - span.start
            of_others = [0] * size
            of_others[rank] = rows
            return [
                self._group.start_send(
                    to,
                    Message(
                        Kind.VECTOR,
                        self._numbers(images.sent(rank, to, of_others)),
                        step=rows,
                        tag=PICTURES,
                    ),
                )
                for to in others(rank, size)
            ]

        setting_out = start(0)
        for number in range(rounds(self._scheme, size)):
            under_way, setting_out = setting_out, start(number + 1)
            counts = [self._rows(batch, number, source, PICTURES) for source in range(size)]
            if any(counts):
                for each in others_of_pass[:head]:
                    self._exchange(each, counts)
            under_way += self._send(batch, number)
            for source in range(size):
                self._rows(batch, number, source)
            if any(counts):
                self._round(counts)
                for each in others_of_pass[head:]:
                    self._exchange(each, counts)
            for handle in under_way:
                handle.wait()
        return 0.0

    def _exchange(self, what: Exchange, counts: Sequence[int]) -> None:
        rank, workers = self._rank, range(self._size)
        self._swap(
            [what.sent(rank, to, counts) for to in workers],
            [what.sent(source, rank, counts) for source in workers],
        )

    def _round(self, counts: Sequence[int]) -> None:
        rank, rows = self._rank, sum(counts)
        *hidden, last = self._widths
        for widths in hidden:
            self._swap([rows * widths[rank]] * self._size, [rows * width for width in widths])
        logits = [count * last[rank] for count in counts], [counts[rank] * width for width in last]
        self._swap(*logits)
        self._swap(*reversed(logits))
        for widths in reversed(hidden):
            self._swap([rows * width for width in widths], [rows * widths[rank]] * self._size)
        if self._sizes.trains_trunk:
            features = self._sizes.features
            self._swap([count * features for count in counts], [counts[rank] * features] * self._size)

    def _send(self, batch: int, number: int) -> list[Handle]:
        last = number >= rounds(self._scheme, self._size)
        if last or not sends(self._scheme, self._rank, number):
            return []
        span = place(self._scheme, batch, self._size, number)
        rows = span.stop - span.start
        examples = self._numbers(rows * self._sizes.features)
        # The number of rows cannot be inferred from numbers that stand for several.
        message = Message(Kind.VECTOR, examples, step=rows, tag=EXAMPLES)
        return [self._group.start_send(to, message) for to in others(self._rank, self._size)]

    def _rows(self, batch: int, number: int, source: int, tag: int = EXAMPLES) -> int:
        if not sends(self._scheme, source, number):
            return 0
        if source != self._rank:
            _, message = self._group.receive(source, tag)
            return message.step
        span = place(self._scheme, batch, self._size, number)
        rows: int = span.stop - span.start
        return rows

    def _swap(self, sent: Sequence[int], taken: Sequence[int]) -> None:
        """Send `sent[w]` values to each worker w, and wait for `taken[w]` from each."""
        handles = [
            self._group.start_send(to, Message(Kind.VECTOR, self._numbers(sent[to]), tag=LAYERS))
            for to in others(self._rank, self._size)
            if sent[to]
        ]
        for source, count in enumerate(taken):
            if count and source != self._rank:
                self._group.receive(source, LAYERS)
        for handle in handles:
            handle.wait()

    def _numbers(self, count: int) -> Tensor:
        return self._sizes.number.new_zeros(round(count / self._sizes.stands_for))
