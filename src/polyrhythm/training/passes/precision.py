"""Mixed precision: matrix products and convolutions in 16 bits where the device has them; weights stay.

Paper: P. Micikevicius and others, "Mixed precision training", ICLR 2018, arXiv 1710.03740.

float16 has few exponent bits, so small gradients would vanish: the loss is scaled up, and gradients down
again.

    with precision.autocast():
        loss = loss_of(model(images), labels)
    precision.scale(loss).backward()
    if precision.unscale(gradients):        # before they are sent: each rank may have a scale of its own
        optimizer.step()
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import RequestError, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """In what precision the forward pass computes; made by `choose`.

    Args:
        dtype: of matrix products and convolutions; float32 means: whatever the model has.
        device: where the model is.

    Attributes:
        dtype: as given.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None

    @classmethod
    def choose(cls, name: str, device: torch.device) -> Precision:
        """Chooses by name.

        Args:
            name: `float32`, `bfloat16`, `float16`, or `auto`: the best that the device is fast in.
            device: where the model is.

        Raises:
            RequestError: no such name, or the device cannot do it.
        """
        if name == "auto":
            return cls(_fastest(device), device)
        if name not in _DTYPES:
            raise unknown("precision", name, [*_DTYPES, "auto"])
        able = _able(device)
        if _DTYPES[name] not in able:
            names = " or ".join(known for known, dtype in _DTYPES.items() if dtype in able)
            raise RequestError(f"precision {name} is not possible on {device.type}: choose {names}")
        return cls(_DTYPES[name], device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Gives the context for the forward pass and the loss."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Gives what `backward` is to be called on: the loss, scaled if gradients will be."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, gradients: Tensor) -> bool:
        """Scales gradients back, in place, and adapts the scale.

        Args:
            gradients: `(n,)`, of one backward pass, in float32 or float64.

        Returns:
            Whether they may be used. Only a scaled loss can overflow by itself: then they are not finite, the
            scale is lowered, and this step should be left out. Where nothing is scaled, nothing is looked at:
            always true.
        """
        if self._scaler is None:
            return True
        probe = _Probe(gradients)
        self._scaler.unscale_(probe)
        self._scaler.step(probe)
        self._scaler.update()
        return probe.stepped

    def state_dict(self) -> dict[str, Any]:
        """Gives the scale and its history, JSON-able; empty where nothing is scaled."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; a state from another precision leaves the scale as it is."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


class _Probe(torch.optim.Optimizer):
    """Shows gradients to `GradScaler`, which steps only optimisers whose gradients are finite."""

    def __init__(self, gradients: Tensor) -> None:
        parameter = nn.Parameter(gradients)
        parameter.grad = gradients
        super().__init__([parameter], {})
        self.stepped = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Notes that the gradients are finite."""
        self.stepped = True


def _able(device: torch.device) -> set[torch.dtype]:
    able = {torch.float32}
    if device.type == "cpu":
        able.add(torch.bfloat16)
    elif device.type == "cuda":
        able.add(torch.float16)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            able.add(torch.bfloat16)
    return able


def _fastest(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        # most CPUs only imitate bfloat16, several times slower than float32
        return torch.float32
    return torch.bfloat16 if torch.bfloat16 in _able(device) else torch.float16
