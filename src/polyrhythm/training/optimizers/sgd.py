"""Stochastic gradient descent with momentum.

Papers: B. Polyak, "Some methods of speeding up the convergence of iteration methods", USSR Computational
Mathematics and Mathematical Physics, 1964; Nesterov's form as in I. Sutskever, J. Martens, G. Dahl, G.
Hinton, "On the importance of initialization and momentum in deep learning", ICML 2013.

    v <- m v + g
    w <- w - lr v                 nesterov:  w <- w - lr (g + m v)

m is `momentum`. Unlike the papers, which keep `v <- m v - lr g`, the learning rate stands outside the buffer,
so that nothing needs mending when it changes; the buffer starts as the first gradient.

`momentum=auto`, for asynchronous workers: asynchrony itself acts as momentum. The total is measured at every
update, and m is corrected until it is `target` (see `closed_loop`; J. Zhang, I. Mitliagkas, "YellowFin and
the art of momentum tuning", 2017, arXiv 1706.03471). Servers report the age of each gradient.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import PlainValidator, TypeAdapter, ValidationError, model_validator

from polyrhythm.errors import RequestError
from polyrhythm.training.closed_loop import ClosedLoopSGD, Estimate
from polyrhythm.training.optimizer import OptimizerConfig
from polyrhythm.training.quantities import Decay, InnerFraction, Positive

_DECAY: TypeAdapter[float] = TypeAdapter(Decay)


def _momentum(value: Any) -> Any:
    # One validator for both: pydantic's complaint about a union names its members.
    if value == "auto":
        return value
    try:
        return _DECAY.validate_python(value)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None


class SGD(OptimizerConfig):
    """Keys of SGD.

    Attributes:
        momentum: share of the buffer that is kept at each step; `auto`: such that with what staleness adds it is
            `target`.
        nesterov: look ahead along the buffer.
        target: momentum in all, of `auto` only.
        gain: share of what is measured too much or too little by which an update corrects it, of `auto` only.
        estimate: estimate of the total, of `auto` only: along the steps that were taken (`projection`), or
            YellowFin's `median` over the numbers of the vector.
    """

    kind: ClassVar = torch.optim.SGD

    lr: Positive = 0.05
    momentum: Annotated[float | Literal["auto"], PlainValidator(_momentum)] = 0.9
    nesterov: bool = False
    target: Decay = 0.9
    gain: InnerFraction = 0.01
    estimate: Estimate = "projection"

    @model_validator(mode="after")
    def _look_ahead_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise RequestError("optimizer sgd: nesterov=True needs a momentum above 0, such as momentum=0.9")
        if self.momentum == "auto":
            if self.nesterov:
                raise RequestError(
                    "optimizer sgd: momentum=auto looks back and not ahead: leave nesterov out"
                )
        elif given := sorted(self.model_fields_set & {"target", "gain", "estimate"}):
            raise RequestError(
                f"optimizer sgd: {given[0]} is for momentum=auto: give that, or leave {given[0]} out"
            )
        return self

    @property
    def follows_staleness(self) -> bool:
        return self.momentum == "auto"

    def of_groups(self, groups: list[Any]) -> torch.optim.Optimizer:
        if self.momentum == "auto":
            return ClosedLoopSGD(
                groups,
                lr=self.lr,
                momentum=self.target,
                gain=self.gain,
                estimate=self.estimate,
                weight_decay=self.weight_decay,
            )
        return torch.optim.SGD(
            groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay
        )
