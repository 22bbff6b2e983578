"""What strategies with a `compress` key have in common: the key, and what is refused.

Norms of whole layers are those of true gradients, so optimisers that take them (LARS, LAMB) are refused; so is a
compressor's momentum on top of the optimiser's.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from polyrhythm.compression.compressor import COMPRESSORS, Compressor
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.flat_optimizer import LAYERWISE
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


def _compressor(value: Any) -> Any:
    if value is None or isinstance(value, Compressor) or value == "none":
        return None if value == "none" else value
    return build("compressor", value, COMPRESSORS)


Compress = Annotated[Compressor | None, BeforeValidator(_compressor)]
"""A compressor, or none."""


class Compressible(Strategy):
    """A strategy that can compress what it sends.

    Attributes:
        compress: what shrinks vectors before they travel; None: nothing.
    """

    compress: Compress = None

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        check_compression(self.compress, plan)

    def check_model(self, flat: FlatParameters) -> None:
        if self.compress is not None:
            from polyrhythm.compression.layout import Layout  # no other run pays for it

            Layout.of_model(flat, self.compress)


def check_compression(compressor: Compressor | None, plan: OptimizerPlan | None) -> None:
    """Refuse an optimiser that cannot follow compressed gradients.

    Args:
        compressor: of the gradients.
        plan: of the optimiser; None before that is known.

    Raises:
        RequestError: with the reason and what would work.
    """
    if compressor is None or plan is None:
        return
    if plan.kind in LAYERWISE:
        raise RequestError(
            f"{plan.kind} takes the norms of layers' gradients, which are others after {compressor.name}: use sgd or "
            "adam, or leave compress out"
        )
    if compressor.own_momentum and any(_momentum(span.options) for span in plan.spans):
        raise RequestError(
            f"{compressor.name} has a momentum of its own, and on top of the optimiser's it would count twice: use "
            "--optimizer 'sgd(momentum=0)', or another compressor, such as top_k"
        )


def _momentum(options: dict[str, Any]) -> bool:
    return bool(options.get("momentum") or options.get("betas"))
