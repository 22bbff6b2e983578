"""Hessian-free: Newton's step by conjugate gradients, with curvature that is only ever multiplied by vectors.

J. Martens, "Deep learning via Hessian-free optimization", ICML 2010; N. Schraudolph, "Fast curvature matrix-vector
products", Neural Computation 14(7), 2002, for the products.

    (B + l I) d = -g        B v = mean over all workers' images of J^T H J v
    w <- w + lr a d         a = 1, b, b^2, …  (b = `backtrack`), the first with f(w + lr a d) <= f(w) + c lr a g.d

g is the mean gradient, J the derivative of the network's outputs by its parameters, H that of the loss by the outputs:
B is the Gauss-Newton matrix of the step's batch, all workers' together. Each product is one exchange of as many numbers
as there are parameters. Conjugate gradients begin with `warm` times the step before, and end after `iterations`, or as
soon as the last tenth of them (10 at least) has lowered the quadratic model by less than `tolerance` a step. l is
`damping`; by Levenberg and Marquardt it grows by half where the loss falls by less than a quarter of what the model
promised, and falls to two thirds where by more than three quarters.

A large batch is needed, since one step goes a long way by it: `--accumulate` makes one. Departures: no preconditioner,
for which the paper needs the gradients of single images; the last iterate is taken, not the best of some; no damping
by structure. Weight decay counts as part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.joint_optimizer import Joint, JointOptimizer, Pass, averaged
from polyrhythm.training.quantities import Count, Decay, InnerFraction, NonNegative, Positive

_SUFFICIENT = 1e-2
_TRIED = 30
_LEAST_WINDOW = 10
_PRODUCT_SHARE, _LOSS_SHARE = 4 / 3, 1 / 3
"""Shares of a step's time: two backward passes, and a forward pass."""

Product = Callable[[Tensor], Tensor]


class ConjugateGradientOptimizer(JointOptimizer):
    """Hessian-free optimization by the module's rule."""

    options: ClassVar = {
        "lr": 1.0,
        "weight_decay": 0.0,
        "damping": 1.0,
        "adaptive": True,
        "iterations": 50,
        "tolerance": 0.0005,
        "warm": 0.95,
        "backtrack": 0.8,
    }

    def tie(self, model: nn.Module) -> None:
        self._model = model
        self._passes: list[Pass] = []

    def begin(self, number: int, seed: int) -> None:
        self._passes = []

    def observe(self, scores: Tensor, batch: Pass) -> None:
        self._passes.append(batch)

    def update(self, flat: FlatParameters, rate: float) -> None:
        before = flat.vector.clone()
        group = self.param_groups[0]
        with self._statistics_kept():
            try:
                damping, direction = self._moved(flat, before, rate, group)
            except BaseException:
                flat.vector.copy_(before)
                raise
        self._passes = []
        for each in self.param_groups:
            each["lr"], each["damping"] = rate, damping
        for view in flat.views:
            part = direction[view.start : view.stop].view(view.parameter.shape)
            self.state[view.parameter]["direction"] = part.clone()

    def _moved(
        self, flat: FlatParameters, before: Tensor, rate: float, group: dict[str, Any]
    ) -> tuple[float, Tensor]:
        """Move the vector; return the damping of the next step and the direction of this one."""
        decay = self._decay(flat)
        gradient = flat.gradients + decay * before
        product, loss = self._curvature(flat, decay)
        start = torch.cat(
            [
                self.state[view.parameter].get("direction", torch.zeros_like(view.gradient)).reshape(-1)
                for view in flat.views
            ]
        )
        damping = group["damping"]
        direction, residual = self._solved(product, gradient, start * group["warm"], damping, group)
        slope, curved = self._agreed(
            gradient @ direction, -direction @ (gradient + residual + damping * direction)
        )
        scale, fraction = 1.0, 0.0
        for trial in range(_TRIED):
            flat.vector.copy_(before).add_(direction, alpha=rate * scale)
            now = self._loss(flat, decay)
            if trial == 0:
                promised = rate * slope + rate**2 * curved / 2
                fraction = (now - loss) / promised if promised < 0 else 0.0
            if now <= loss + _SUFFICIENT * rate * scale * slope:
                break
            scale *= group["backtrack"]
        else:
            flat.vector.copy_(before)
        if group["adaptive"]:
            damping *= 1.5 if fraction < 0.25 else 2 / 3 if fraction > 0.75 else 1.0
        return damping, direction

    def _decay(self, flat: FlatParameters) -> Tensor:
        """Return the weight decay of every number, `(n,)`."""
        of = {
            parameter: group["weight_decay"] for group in self.param_groups for parameter in group["params"]
        }
        found = torch.zeros_like(flat.vector)
        for view in flat.views:
            found[view.start : view.stop] = of[view.parameter]
        return found

    def _curvature(self, flat: FlatParameters, decay: Tensor) -> tuple[Product, float]:
        """Return the products with B, of the parameters as they are, and the loss."""
        parameters = [view.parameter for view in flat.views]
        made = [_gauss_newton(each, parameters, flat) for each in self._passes]
        images = sum(each.images for each in self._passes)
        total = flat.vector.new_tensor(
            sum(each.images * loss for each, (loss, _) in zip(self._passes, made, strict=True))
        )
        (mean,), _ = averaged(self.workers, [total], images)
        (loss,) = self._agreed(mean + (decay * flat.vector.detach().square()).sum() / 2)

        def product(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for batch, (_, own_product) in zip(self._passes, made, strict=True):
                total += batch.images * own_product(vector)
            self.pass_time(_PRODUCT_SHARE if images else 0.0)
            (mean,), _ = averaged(self.workers, [total], images)
            return mean + decay * vector

        return product, loss

    def _solved(
        self, product: Product, gradient: Tensor, start: Tensor, damping: float, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the solution of (B + damping I) d = -gradient as far as it was followed, and the residual."""
        found = start
        residual = -gradient
        if bool(start.any()):
            residual = residual - product(found) - damping * found
        along = residual.clone()
        (square,) = self._agreed(residual @ residual)
        values: list[float] = []
        for number in range(1, group["iterations"] + 1):
            if square == 0:
                break
            curved = product(along) + damping * along
            (height,) = self._agreed(along @ curved)
            if height <= 0:  # only rounding errors remain
                break
            found = found + square / height * along
            residual = residual - square / height * curved
            before = square
            square, value = self._agreed(residual @ residual, found @ (gradient - residual) / 2)
            values.append(value)
            window = max(_LEAST_WINDOW, number // 10)
            if number > window and value < 0:
                gained = (value - values[-1 - window]) / value
                if gained < window * group["tolerance"]:
                    break
            along = residual + square / before * along
        return found, residual

    def _loss(self, flat: FlatParameters, decay: Tensor) -> float:
        """Return the mean loss of all workers' images, and of weight decay, of the parameters as they are."""
        images = sum(each.images for each in self._passes)
        total = flat.vector.new_zeros(())
        with torch.no_grad():
            for each in self._passes:
                total += each.images * each.loss(each.scores())
        self.pass_time(_LOSS_SHARE if images else 0.0)
        (mean,), _ = averaged(self.workers, [total], images)
        (loss,) = self._agreed(mean + (decay * flat.vector.square()).sum() / 2)
        return loss

    def _agreed(self, *numbers: Tensor) -> tuple[float, ...]:
        """Return worker 0's numbers: processors of other kinds add up in another order, and all must decide alike."""
        together = torch.stack([number.double() for number in numbers])
        self.workers.broadcast(together)
        return tuple(together.tolist())

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Restore the buffers, which further passes over the batch change: the statistics of batch norm."""
        before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.copy_(value)


def _gauss_newton(batch: Pass, parameters: list[nn.Parameter], flat: FlatParameters) -> tuple[float, Product]:
    """Return the mean loss of a pass, and products with its Gauss-Newton matrix, for which its graph is kept."""
    scores = batch.scores()
    # J^T u is linear in u, so its derivative by u is J, whatever u is.
    dual = torch.zeros_like(scores, requires_grad=True)
    back = torch.autograd.grad(
        scores, parameters, dual, create_graph=True, allow_unused=True, materialize_grads=True
    )
    leaf = scores.detach().requires_grad_()
    loss = batch.loss(leaf)
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        parts = [vector[view.start : view.stop].view(view.parameter.shape) for view in flat.views]
        (along,) = torch.autograd.grad(back, dual, parts, retain_graph=True)
        (bent,) = torch.autograd.grad(slope, leaf, along, retain_graph=True)
        found = torch.autograd.grad(
            scores, parameters, bent, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([each.reshape(-1) for each in found])

    return float(loss.detach()), product


class HessianFree(Joint):
    """Keys of Hessian-free optimization.

    Attributes:
        damping: constant added to every eigenvalue of the curvature, in the first step.
        adaptive: whether damping follows the quadratic model's accuracy.
        iterations: iterations of conjugate gradients, at most; each is an exchange.
        tolerance: minimum mean decrease of the model per iteration, as a share of all its decrease; 0:
            anything.
        warm: share of the step before with which they begin.
        backtrack: factor by which a step shrinks until the loss falls enough.
    """

    kind: ClassVar = ConjugateGradientOptimizer
    layerwise: ClassVar[bool] = True
    any_precision: ClassVar[bool] = False

    lr: Positive = 1.0
    damping: Positive = 1.0
    adaptive: bool = True
    iterations: Count = 50
    tolerance: NonNegative = 0.0005
    warm: Decay = 0.95
    backtrack: InnerFraction = Field(default=0.8)
