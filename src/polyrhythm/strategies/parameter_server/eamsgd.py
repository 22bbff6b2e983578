"""Elastic averaging with Nesterov's momentum (EAMSGD).

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, arXiv 1412.6651, section 3.

    v_i' = delta v_i - lr g_i(x_i + delta v_i)
    x_i' = x_i + v_i' - d_i                           d_i = alpha (x_i - c) every tau steps, else 0; c as in EASGD

delta = `delta`; tau, alpha and c as in `easgd`. With delta = 0 this is `easgd`, bit for bit.

Departures from the paper, in addition to those of `easgd`:

- Any optimizer may replace SGD, and v is the result of its step from the point ahead.
- The default delta is SGD's default momentum here, 0.9. The paper has 0.99 with smaller learning rates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.elastic.averaging import (
    ElasticAveraging,
    LocalStep,
    NesterovStep,
)
from polyrhythm.strategies.strategy import Facts
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.quantities import Decay


class EAMSGD(ElasticAveraging):
    """Elastic averaging of workers that step with Nesterov's momentum.

    The momentum is `delta`: an optimizer's own must be the same, for which it then stands, or 0.

    Attributes:
        delta: share of the velocity that is kept. For the others see `ElasticAveraging`.
    """

    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M/tau",
        staleness="N-1 (0 if synchronous)",
        use_it="as easgd, where steps are few: the momentum looks ahead",
    )
    plain_steps: ClassVar[bool] = False

    delta: Decay = 0.9

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        if plan is not None:
            _without_momentum(plan, self.delta)

    def local_step(self, setting: WorkerSetting) -> LocalStep:
        """Make the step with momentum; raise `RequestError` if the optimizer has another one."""
        plan = _without_momentum(setting.plan, self.delta)
        return NesterovStep(setting.flat.vector, plan, self.delta)


def _without_momentum(plan: OptimizerPlan, delta: float) -> OptimizerPlan:
    spans = []
    for span in plan.spans:
        momentum = span.options.get("momentum", 0)
        if momentum not in (0, delta):
            raise RequestError(
                f"eamsgd has momentum delta={delta:g}, and the optimizer one of {momentum:g}: give it momentum=0"
            )
        without = {"momentum": 0, "nesterov": False, "dampening": 0}
        options = {key: without.get(key, value) for key, value in span.options.items()}
        spans.append(replace(span, options=options))
    return replace(plan, spans=tuple(spans))
