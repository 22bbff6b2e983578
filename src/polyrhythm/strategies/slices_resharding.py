"""Slices of layers with another number of workers: optimisers' states are put together, and cut where layers now are.

before    trunk of worker 0 | slice of worker 0 | of 1 | of 2 | …        together the whole vector
after     everybody is given all of them, and takes what belongs to its own (`HybridUpdate.load_state`)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from polyrhythm.strategies.resharding import Held, Merged


class OfSlices:
    """Of workers that share the last layers of a network; see `Resharding`."""

    def counted(self, held: Held) -> list[int]:
        """All go in step."""
        return [held.steps[0]] * len(held.steps)

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody gets worker 0's parameters, which are whole, and all optimisers' states."""
        tensors: dict[str, Tensor] = {}
        slices: list[list[Any]] = []
        for worker in sorted(held.workers):
            own, facts = held.workers[worker]
            for number, (start, stop) in enumerate(facts["pieces"]):
                if start == stop or (number == 0 and worker > 0):  # the trunk is everybody's
                    continue
                prefix = f"{number}."
                tensors |= {
                    f"{len(slices)}.{name.removeprefix(prefix)}": value
                    for name, value in own.items()
                    if name.startswith(prefix)
                }
                slices.append([start, stop, facts[str(number)]])
        every = dict.fromkeys(range(workers), (tensors, {"slices": slices}))
        text = "all go on from worker 0's parameters, and layers are cut anew with their optimisers' states"
        return Merged(replace(held, workers=every), text)
