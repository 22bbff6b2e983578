"""SGD with a momentum that compensates for the momentum of asynchrony: the closed loop of YellowFin.

J. Zhang, I. Mitliagkas, "YellowFin and the art of momentum tuning", 2017, arXiv 1706.03471, section 4; I. Mitliagkas
and others, "Asynchrony begets momentum", Allerton 2016, arXiv 1605.09774.

    n = w_{r+1} - w_r + lr g,  d = w_r - w_{r-1}                 r = t - age: g was computed at w_r
    M = n.d / d.d                    estimate=projection; of estimate=median, the paper's: M = median (n / d)
    m <- m + k (m* - M)
    v <- m v + g,  w <- w - lr v

M is the total momentum; m* is its target (`momentum`), k is `gain`. m begins as m* and may fall below 0. A
gradient of age 0 shows m itself. Departures: the paper takes the median over the numbers of the vector; in a
network most are bent so little that staleness shows in none of them. The projection (least squares for M in n
= M d)
weighs numbers by how far they move, which is where staleness does harm: on a quadratic of curvature H,
M = m + lr d.H (d_1 + ... + d_age) / d.d, the curvature along the steps that were taken. Of a long vector 65,536
numbers that lie evenly in it are looked at; m stays between -0.95 and 0.99; the target is given and not tuned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Estimate = Literal["projection", "median"]
_LOOKED_AT = 1 << 16
_LEAST, _MOST = -0.95, 0.99


class ClosedLoopSGD(torch.optim.Optimizer):
    """SGD with the momentum of the module's rule, of each parameter by itself.

    Args:
        params: parameters, as for every `torch.optim` optimizer.
        options: options of all groups without their own.

    Attributes:
        options: all options, with their defaults; `window`: points that are kept, so that ages up to two fewer
            can be measured.
        age: updates between the reading of the parameters at which the next gradient was computed, and its update;
            None: unknown, as where several gradients make one update. Nothing is measured then.
    """

    options: ClassVar[dict[str, Any]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "gain": 0.01,
        "estimate": "projection",
        "window": 64,
    }

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**self.options, **options})
        self.age: int | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: change the parameters and the state in place.

        Args:
            closure: unused, because the gradients exist.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group, self.state[parameter])
        self.age = None
        return None

    def _step_one(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["updates"], state["momentum"] = 0, float(group["momentum"])
            state["momentum_buffer"] = torch.zeros_like(parameter)
        seen = _seen(parameter)
        state[f"point.{state['updates'] % group['window']}"] = seen.clone()
        total = self._total_momentum(seen, gradient, group, state)
        if total is not None:
            state["total"] = total
            corrected = state["momentum"] + group["gain"] * (group["momentum"] - total)
            state["momentum"] = min(max(corrected, _LEAST), _MOST)
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["momentum_buffer"].mul_(state["momentum"]).add_(gradient)
        parameter.add_(state["momentum_buffer"], alpha=-group["lr"])
        state["updates"] += 1

    def _total_momentum(
        self, seen: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> float | None:
        """Return the total momentum that the gradient implies; None where it implies none."""
        age, updates, window = self.age, state["updates"], group["window"]
        if age is None or updates - age < 1 or age > window - 2:
            return None
        if age == 0:
            return float(state["momentum"])
        before, read, after = (state.get(f"point.{(updates - age + shift) % window}") for shift in (-1, 0, 1))
        if before is None or read is None or after is None or not before.shape == after.shape == seen.shape:
            return None  # the vector was cut otherwise then
        slope = _seen(gradient) + group["weight_decay"] * read
        kept, moved = after - read + group["lr"] * slope, read - before
        if group["estimate"] == "projection":
            length = float(moved @ moved)
            found = float(kept @ moved) / length if length else math.nan
            return found if math.isfinite(found) else None
        ratios = kept / moved
        ratios = ratios[ratios.isfinite()]
        return float(ratios.median()) if len(ratios) else None


def _seen(values: Tensor) -> Tensor:
    """Return the numbers that are looked at, `(m,)`, a view."""
    flat = values.reshape(-1)
    return flat[:: -(-len(flat) // _LOOKED_AT)]
