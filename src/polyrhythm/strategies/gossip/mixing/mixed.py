"""Mixed: workers that mix in turns hold what the matrices of their topology say, and lose and double nothing.

gradient first    X(t+1) = P_t (X(t) - G(t)),  a(t+1) = P_t a(t),  z = X/a       push-sum
else              X(t+1) = P_t X(t) - G(t)                                       D-PSGD
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.strategies.invariant import Conditions, Invariant, Stepped, Violation
from polyrhythm.strategies.topology import Topology

_TOLERANCE = 1e-4
"""Of sums in float32, relative to the largest number; a gradient that is lost or doubled is far more."""


class Mixed(Invariant):
    """Every worker's parameters after every step are those of the rule, computed with whole matrices in float64.

    Args:
        conditions: with known gradients; without, nothing is checked.
        topology: who mixes with whom.
        gradient_first: whether gradients are applied before mixing, and parameters divided by their mass.
        delay: steps after which what was sent is taken, with gradients first.
    """

    def __init__(
        self, conditions: Conditions, topology: Topology, *, gradient_first: bool, delay: int = 0
    ) -> None:
        self._gradient = conditions.gradient
        self._workers = conditions.cast.workers
        peers = len(self._workers)
        self._first = gradient_first
        self._delay = delay
        self._matrices = (
            [topology.matrix(peers, turn) for turn in range(topology.period(peers))] if self._gradient else []
        )
        self._values = torch.zeros(peers, conditions.numbers if self._gradient else 0, dtype=torch.float64)
        self._mass = torch.ones(peers, 1, dtype=torch.float64)
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._shown: dict[int, Tensor] = {}
        self._done = 0

    def stepped(self, event: Stepped) -> None:
        """Compares with the rule."""
        if self._gradient is None:
            return
        while self._done <= event.step:
            self._turn()
        worker = self._workers.index(event.rank)
        expected = self._shown[event.step][worker]
        error = (event.vector.double() - expected).abs().max()
        if error > _TOLERANCE * (1 + expected.abs().max()):
            raise Violation(
                f"parameters after step {event.step}",
                rank=event.rank,
                time_s=event.time_s,
                expected="what mixing by the matrices gives",
                found=f"numbers that differ by up to {float(error):g}",
            )

    def _turn(self) -> None:
        assert self._gradient is not None
        gradients = torch.stack(
            [self._gradient(worker, self._done).double() for worker in range(len(self._mass))]
        )
        matrix = self._matrices[self._done % len(self._matrices)]
        if self._first:
            self._push(matrix, self._values - gradients)
        else:
            self._values = matrix @ self._values - gradients
        self._shown[self._done] = self._values / self._mass
        self._shown.pop(self._done - len(self._mass) - 1, None)  # nobody is that far behind its neighbours
        self._done += 1

    def _push(self, matrix: Tensor, values: Tensor) -> None:
        kept = torch.diag(matrix.diag())
        sent = matrix - kept
        self._under_way.append((sent @ values, sent @ self._mass))
        self._values, self._mass = kept @ values, kept @ self._mass
        if len(self._under_way) > self._delay:
            arrived, mass = self._under_way.pop(0)
            self._values, self._mass = self._values + arrived, self._mass + mass
