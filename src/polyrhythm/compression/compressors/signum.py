"""Signum: the majority vote of signSGD, of momenta.

Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: compressed optimization for non-convex problems", ICML 2018,
arXiv 1802.04434, algorithm 2.

    m_i <- b m_i + (1 - b) g_i
    w'  =  w - lr sgn(sum_i sgn(m_i))        b is `momentum`; sgn(0) = +1

Each worker keeps its own momentum, so the optimizer must have none.

Payload: as of `sign_sgd`.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyrhythm.compression.compressor import Memory
from polyrhythm.compression.compressors.sign_sgd import SignSGD
from polyrhythm.training.quantities import Decay

_MOMENTUM = "momentum"


class Signum(SignSGD):
    """One bit a number each way: every worker votes for the direction of its momentum.

    Attributes:
        momentum: decay of the momentum per step.
    """

    own_momentum: ClassVar[bool] = True

    momentum: Decay = 0.9

    def before(self, gradient: Tensor, memory: Memory) -> Tensor:
        last = memory.get(_MOMENTUM)
        new = gradient * (1 - self.momentum)
        memory[_MOMENTUM] = new if last is None else new.add_(last, alpha=self.momentum)
        return memory[_MOMENTUM]
