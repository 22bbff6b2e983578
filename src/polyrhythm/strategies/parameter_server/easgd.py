"""Elastic averaging SGD (EASGD).

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, arXiv 1412.6651.

    every step        x_i' = x_i - lr g_i(x_i) - d_i               d_i = alpha (x_i - c) every tau steps, else 0
    asynchronous      c' = c + d_i                                 whenever a worker exchanges
    synchronous       c' = c + sum_i d_i = (1 - beta) c + beta mean_i x_i         when all do; beta = N alpha

c = the center, which is tested and saved. All right-hand sides are old values: the gradient is that at the point before
the pull. lr is the optimizer's, and any optimizer takes SGD's place on a worker.

Departures from the paper:

- Servers compute the difference. So an exchange is one round trip, hidden behind the gradient, and no other
  exchange is between
  reading c and changing it.
- Workers pull at the center once more at the end, so that it gets every gradient.
- alpha is beta / N, as in the authors' code, and not beta / (tau N) as in TensorFlow's.
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.parameter_server.elastic.averaging import (
    ElasticAveraging,
    LocalStep,
    PlainStep,
)
from polyrhythm.strategies.strategy import Facts
from polyrhythm.strategies.worker_part import WorkerSetting


class EASGD(ElasticAveraging):
    """Workers train alone, and every few steps they and a center pull at each other.

    Attributes: see `ElasticAveraging`.
    """

    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/tau",
        staleness="N-1 (0 if synchronous)",
        use_it="slow networks and uneven machines: little is sent, and workers explore on their own",
    )
    plain_steps: ClassVar[bool] = True

    def local_step(self, setting: WorkerSetting) -> LocalStep:
        return PlainStep(setting.flat.vector, setting.plan)
