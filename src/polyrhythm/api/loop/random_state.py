"""The state of every generator that a training script draws from, as plain values: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyrhythm.training.checkpoint import restoring

_SAVED = "the saved state of the random generators"

GLOBAL_GENERATORS = RLock()
"""The threads of a process share its global generators: seeds, states and draws of two threads would mix."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's generators, JSON-able.

    Args:
        device: device of the model; its generator is included.
    """
    with GLOBAL_GENERATORS:
        version, numbers, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        found = {
            "torch": text_of(torch.get_rng_state()),
            "python": [version, list(numbers), gauss],
            "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        }
        if device.type == "cuda":
            found["cuda"] = text_of(torch.cuda.get_rng_state(device))
        return found


@restoring(_SAVED)
def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set this process's generators to what `random_state` returned."""
    with GLOBAL_GENERATORS:
        torch.set_rng_state(tensor_of(state["torch"]))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(tensor_of(state["cuda"]), device)


class RandomStateToRestore:
    """A state that a resumed run sets when its first batch is due, so that earlier draws of a script do not change it.

    Args:
        state: result of `random_state`.
        device: device of the model.
    """

    def __init__(self, state: dict[str, Any], device: torch.device) -> None:
        self._state = state
        self._device = device
        self._due = True

    def restore(self) -> None:
        """Set it."""
        set_random_state(self._state, self._device)

    def restore_once(self) -> None:
        """Set the state at the first call."""
        if self._due:
            self._due = False
            self.restore()


def generator_states(generators: Sequence[torch.Generator]) -> list[str]:
    """Return the states of some generators, as texts."""
    return [text_of(each.get_state()) for each in generators]


@restoring(_SAVED)
def set_generators(generators: Sequence[torch.Generator], states: Sequence[str]) -> None:
    """Set generators to states that `generator_states` returned of as many; others stay as they are."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(tensor_of(state))


def text_of(numbers: Tensor) -> str:
    """Return bytes, `(n,)`, as hexadecimal digits."""
    return numbers.numpy().tobytes().hex()


def tensor_of(text: str) -> Tensor:
    """Return the tensor that `text_of` wrote."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
