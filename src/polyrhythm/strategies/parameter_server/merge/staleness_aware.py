"""Staleness-aware: a gradient that is tau updates old counts for 1/tau of a fresh one.

Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for Distributed Deep Learning", IJCAI 2016, arXiv 1511.05950.

    w' = w - (1/c) * sum_l lr(tau_l) * g_l        lr(tau) = lr / max(1, tau)

tau = the updates between the reading of the parameters and the application of the gradient.

Departures from the paper:

- A fresh gradient (tau = 0), for which the paper has no rate, counts as one of tau = 1.
- A factor that all gradients of an update have in common lowers the rate and not the gradients. So the rule also works
  with optimizers that do not see a gradient's length (Adam).
"""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule


class StalenessAware(MergeRule):
    """Old gradients count for less."""

    divides: ClassVar[bool] = True

    def factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)
