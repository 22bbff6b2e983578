"""The sufficient factors of fully connected layers' gradients, taken from the passes that make them.

    y = x W^T + b       dL/dW = sum over rows of u v^T,   u = dL/dy,  v = x        (K, outputs), (K, inputs)

Xie, Kim, Zhou, Ho, Kumar, Yu, Xing, "Lighter-communication distributed machine learning via sufficient factor
broadcasting", UAI 2016, arXiv 1409.5705. Several passes before an update, and layers that share a weight, add rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError

Pair = tuple[Tensor, Tensor]
"""u `(K, outputs)` and v `(K, inputs)` of a layer."""


class LinearFactors:
    """Collects the factors of a model's `nn.Linear` layers until they are taken.

    Args:
        model: model with the layers to be hooked.
        starts: starts of parameters in the flat vector, by their `id`; layers with other weights are ignored.

    Raises:
        RequestError: there are no such layers.
    """

    def __init__(self, model: nn.Module, starts: Mapping[int, int]) -> None:
        self._rows: dict[int, list[Pair]] = {}
        layers = [
            each for each in model.modules() if isinstance(each, nn.Linear) and id(each.weight) in starts
        ]
        for layer in layers:
            self._watch(layer, starts[id(layer.weight)])
        if not layers:
            raise RequestError(
                "the model has no fully connected layer (nn.Linear) that is trained, and no other layer has sufficient "
                "factors: use power_sgd, or leave compress out"
            )

    def take(self) -> dict[int, Pair]:
        """Return the factors of all passes since the last call, by where the weight begins in the flat vector."""
        found = {}
        for start, pairs in self._rows.items():
            lefts, rights = zip(*pairs, strict=True)
            found[start] = torch.cat(lefts), torch.cat(rights)
        self._rows = {}
        return found

    def _watch(self, module: nn.Linear, start: int) -> None:
        def note(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            rows = inputs[0].detach()

            def keep(gradient: Tensor) -> None:
                pair = (
                    gradient.detach().reshape(-1, module.out_features),
                    rows.reshape(-1, module.in_features),
                )
                self._rows.setdefault(start, []).append(pair)

            output.register_hook(keep)

        module.register_forward_hook(note)
