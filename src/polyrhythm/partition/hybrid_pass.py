"""Hybrid model and data parallelism: a forward and backward pass of K workers together.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section 4; Wu,
Yan, Shan, Dang, Sun, "Deep Image", 2015, arXiv 1501.02876, section 3.1, has the same split.

    trunk gradient of worker i = d(w_i L_i)/d trunk      to be added up over the workers
    head gradient, slice s     = d(sum_i w_i L_i)/d s    complete on worker s: nobody adds it up again

L_i is the mean loss of worker i's examples, w_i their weight; who divides both by sum_i w_i has the gradients of the
mean over all examples. Rounds are those of the scheme; the head's gradients are those of all rounds together, so all
schemes give those of one large batch. Departure: the paper's option to update the head after every round is left out.

    trunk ─▶ ( examples ─▶ head forward ─▶ logits ─▶ loss ─▶ head backward ─▶ gradients of examples ) per round ─▶ trunk
              └─ those of the next round set out before this one is computed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.partition import scheme as schemes
from polyrhythm.partition.activations import Activations
from polyrhythm.partition.cut import Cut
from polyrhythm.partition.scheme import Scheme
from polyrhythm.partition.sharded_layers import ShardedLayers, added

Loss = Callable[[Tensor, slice], Tensor]
"""Takes logits (R, classes) and the places of their examples in the batch; gives their mean loss, ()."""


class HybridPass:
    """One worker's passes. All workers must call it equally often, with the same network.

    Args:
        parts: of the network.
        group: the workers.
        scheme: which examples the head sees together.
    """

    def __init__(self, parts: Cut, group: Communicator, scheme: Scheme) -> None:
        self._parts = parts
        self._scheme = scheme
        self._activations = Activations(group)
        self._wants_inputs = parts.trains_trunk
        self._head = ShardedLayers(parts.layers, self._activations, wants_inputs=self._wants_inputs)

    @property
    def received_bytes(self) -> int:
        """Bytes of activations and their gradients that this worker has received."""
        return self._activations.received_bytes

    @property
    def places(self) -> list[slice]:
        """This worker's neurons of each layer of the head."""
        return self._head.places

    def run(self, images: Tensor, loss: Loss, weight: float = 1.0) -> float:
        """Adds to the gradients of the trunk and of this worker's slices of the head.

        Args:
            images: (B, C, H, W); a worker without any takes part in the others' head.
            loss: of this worker's examples; what it makes of some of them must not depend on the rest.
            weight: w_i.

        Returns:
            The mean loss of this worker's examples; 0 without any.
        """
        features = self._features(images)
        gradients, value = torch.zeros_like(features), 0.0
        setting_out = self._send(features, 0)
        for number in range(schemes.rounds(self._scheme, self._activations.size)):
            under_way, setting_out = setting_out, self._send(features, number + 1)
            mine = self._place(features, number)
            examples = [self._examples(features, number, source) for source in range(self._activations.size)]
            value += self._round(examples, mine, gradients, (loss, weight))
            self._activations.finish(under_way)
        if features.requires_grad:
            features.backward(gradients)
        return value

    def _features(self, images: Tensor) -> Tensor:
        if len(images):
            with torch.enable_grad():
                features: Tensor = self._parts.trunk(images)
            return features
        like = self._parts.layers[0].linear.weight
        return torch.zeros(0, self._parts.features, dtype=like.dtype, device=like.device)

    def _send(self, features: Tensor, number: int) -> list[Handle]:
        rank, size = self._activations.rank, self._activations.size
        if number >= schemes.rounds(self._scheme, size) or not schemes.sends(self._scheme, rank, number):
            return []
        return self._activations.start(features[self._place(features, number)])

    def _place(self, features: Tensor, number: int) -> slice:
        rank, size = self._activations.rank, self._activations.size
        if not schemes.sends(self._scheme, rank, number):
            return slice(0, 0)
        return schemes.place(self._scheme, len(features), size, number)

    def _examples(self, features: Tensor, number: int, source: int) -> Tensor:
        if source == self._activations.rank:
            return features.detach()[self._place(features, number)]
        if not schemes.sends(self._scheme, source, number):
            return features.detach()[:0]
        return self._activations.examples(source, features)

    def _round(
        self, examples: Sequence[Tensor], mine: slice, gradients: Tensor, of_loss: tuple[Loss, float]
    ) -> float:
        """Passes examples through the head and back; fills this worker's gradients, and gives its part of its loss."""
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
    """Gives `share` of some examples' loss, and the gradient by their logits of as much of the weighted one."""
    if share == 0:
        return 0.0, torch.zeros_like(logits)
    loss, weight = of_loss
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf, mine)
        (gradient,) = torch.autograd.grad(value * (weight * share), leaf)
    return float(value.detach()) * share, gradient
