"""Common parts of strategies with a `compress` key: the key, and the unsupported combinations.

Norms of whole layers are those of true gradients, so optimizers that take them (LARS, LAMB) are refused; so is a
compressor's momentum on top of the optimizer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator

from polyrhythm.compression.compressor import COMPRESSORS, Compressor
from polyrhythm.compression.payoff import Exchange, Payoff, measured_payoff
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
    """A strategy that can compress its messages.

    Attributes:
        compress: compressor of vectors that are sent; None: none.
    """

    compress: Compress = None

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        check_compression(self.compress, plan)

    def check_model(self, flat: FlatParameters) -> None:
        if self.compress is not None:
            from polyrhythm.compression.layout import Layout  # no other run pays for it

            Layout.of_model(flat, self.compress)

    def exchange(self, workers: int, whole_bytes: float, payload_bytes: float) -> Exchange:
        """Return the bytes and computation of one exchange, compressed and not; of sums unless a family overrides it.

        Args:
            workers: number of workers.
            whole_bytes: bytes of the vector.
            payload_bytes: bytes of its compressed form.
        """
        assert self.compress is not None, "asked where something is compressed"
        sums = 2 * (workers - 1) / workers
        added = self.compress.linear or self.compress.factored
        gathered = not added and (self.compress.sparse or workers == 2)
        return Exchange(
            whole_bytes=sums * whole_bytes,
            sent_bytes=(workers - 1 if gathered else sums) * payload_bytes,
            encodings=1.0 if added or gathered else 1 + 1 / workers,
            decodings=1.0 if added else workers if gathered else 2.0,
        )


def check_compression(compressor: Compressor | None, plan: OptimizerPlan | None) -> None:
    """Reject an optimizer that does not work with compressed gradients.

    Args:
        compressor: compressor of the gradients.
        plan: description of the optimizer; None before it is known.

    Raises:
        RequestError: the optimizer cannot be used; the message has the reason and the alternatives.
    """
    if compressor is None or plan is None or compressor.from_passes:
        return
    if plan.kind in LAYERWISE:
        raise RequestError(
            f"{plan.kind} takes the norms of layers' gradients, which are others after {compressor.name}: use sgd or "
            "adam, or leave compress out"
        )
    if compressor.own_momentum and any(_momentum(span.options) for span in plan.spans):
        raise RequestError(
            f"{compressor.name} has a momentum of its own, and on top of the optimizer's it would count twice: use "
            "--optimizer 'sgd(momentum=0)', or another compressor, such as top_k"
        )


def _momentum(options: dict[str, Any]) -> bool:
    return bool(options.get("momentum") or options.get("betas"))


def compressor_of(strategy: Strategy) -> Compressor | None:
    """Return the compressor of a strategy's messages; None: none."""
    return strategy.compress if isinstance(strategy, Compressible) else None


def payoff_of(
    strategy: Strategy,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    workers: int,
    bandwidth_bytes_per_s: float,
) -> Payoff | None:
    """Measure the cost of a strategy's compression on this machine, and return its savings in an exchange.

    Args:
        strategy: strategy.
        shapes: shapes of the model's parameters.
        dtype: dtype of their vector.
        workers: number of workers.
        bandwidth_bytes_per_s: bandwidth of the link.

    Returns:
        None where nothing is compressed or travels, or where bytes depend on the gradients' values.
    """
    if not isinstance(strategy, Compressible) or strategy.compress is None or strategy.compress.by_value:
        return None
    if workers < 2 and not strategy.traits(workers).servers:
        return None
    from polyrhythm.compression.layout import Layout  # no other run pays for it

    made, layout = strategy.compress, Layout.of(shapes, strategy.compress)
    payload = layout.nbytes(made, dtype, made.warm_up)
    assert payload is not None, "its bytes do not depend on values"
    exchange = strategy.exchange(workers, layout.size * dtype.itemsize, payload)
    return measured_payoff(made, layout, exchange, dtype, bandwidth_bytes_per_s)
