"""Delay-compensated asynchronous SGD (DC-ASGD).

Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
arXiv 1609.08326.

    w' = w - lr * [ g_i + lambda_t * g_i * g_i * (w - w_bak(i)) ]      elementwise, whenever worker i's g_i arrives

w_bak(i) = the parameters that worker i has received last. In variant c, lambda_t = `lambda0`. Variant a divides it by
the square root of the gradients' moving mean square. The fields are those of the merge rule `delay_compensated`, which
has the details. Servers keep N + 1 copies of the parameters, and for
variant a also N mean squares.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.merge.delay_compensated import DelayCompensated
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.training.quantities import Decay, NonNegative, Positive


class DCASGD(Served):
    """Asynchronous servers that correct every gradient for what has changed since its worker read.

    Attributes:
        variant: `c` for a constant strength, `a` for one that adapts to the gradients' mean square.
        lambda0: strength of the correction; default: the paper's, 0.04 for `c` and 2 for `a`.
        m: decay of the mean square per step; of `a` only.
        epsilon: constant added to the mean square; of `a` only.
    """

    paper: ClassVar[Paper] = Paper(
        "Zheng, Meng, Wang, Chen, Yu, Ma, Liu",
        "Asynchronous Stochastic Gradient Descent with Delay Compensation",
        "ICML",
        2017,
        "1609.08326",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M",
        staleness="N-1",
        use_it="as the asynchronous parameter server, where stale gradients cost accuracy",
    )

    variant: Literal["c", "a"] = "a"
    lambda0: NonNegative | None = None
    m: Decay = 0.95
    epsilon: Positive = 1e-7

    def rules(self) -> tuple[Consistency, Handling]:
        merge = DelayCompensated(variant=self.variant, lambda0=self.lambda0, m=self.m, epsilon=self.epsilon)
        return Asynchronous(), Handling(merge)
