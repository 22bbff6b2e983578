"""Deep gradient compression.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression: reducing the communication bandwidth for distributed training",
ICLR 2018, arXiv 1712.01887.

    g <- clipped(g)                                local clipping, before anything is added up
    u <- m u + g,   v <- v + u                     momentum correction; nesterov: u <- m (u + g), v <- v + u + g
    d = the largest of v                           k = density * n
    v <- v - d,     u <- 0 where v was sent        momentum factor masking

The momentum is in here, so the optimizer must have none. With m = 0 it is `top_k` with feedback, to the bit. Without
masking it is `top_k` with feedback of the velocity u. With masking, at density 1, u is always reset: plain SGD. What
travels as it is (biases, small tensors) keeps its u, and so is SGD with momentum.

Departures: the k largest are exact, chosen by way of a sample (`sparse.largest`), where the authors' code corrects a
sampled bound until it gives about k. The density falls to its value in five stages over `warm_up` steps.

Payload: see `sparse`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.compression.compressor import RESIDUAL, Memory
from polyrhythm.compression.compressors.top_k import Density, TopK
from polyrhythm.training.quantities import Decay, NonNegative

_VELOCITY = "velocity"


class DGC(TopK):
    """The largest of accumulated momenta travel.

    Attributes:
        density: share of the numbers that travel.
        route: see `top_k`.
        momentum: m of the rule.
        nesterov: whether momentum looks ahead.
        masking: whether what was sent loses its momentum.
        clip: largest norm of a worker's gradient, the paper's threshold over the root of the workers; 0: any.
    """

    own_momentum: ClassVar[bool] = True

    density: Density = 0.001
    momentum: Decay = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: NonNegative = 0.0

    @property
    def works_in_parts(self) -> bool:
        return super().works_in_parts and not self.clip  # by the norm of all

    def before(self, gradient: Tensor, memory: Memory) -> Tensor:
        if self.clip:
            norm = float(gradient.norm())
            gradient = gradient * (self.clip / norm) if norm > self.clip else gradient
        last = memory.get(_VELOCITY)
        if self.nesterov:
            velocity = self.momentum * (gradient if last is None else last + gradient)
            added = velocity + gradient
        else:
            velocity = gradient.clone() if last is None else gradient + self.momentum * last
            added = velocity
        memory[_VELOCITY] = velocity
        return added.clone() if memory.get(RESIDUAL) is None else memory[RESIDUAL] + added

    def after(self, vector: Tensor, decoded: Tensor, memory: Memory, dense: Tensor | None) -> None:
        memory[RESIDUAL] = vector - decoded
        if self.masking:
            sent = decoded != 0
            if dense is not None:
                sent &= ~dense
            memory[_VELOCITY] = torch.where(sent, 0.0, memory[_VELOCITY])
