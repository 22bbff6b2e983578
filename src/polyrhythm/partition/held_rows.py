"""The rows of divided weights and biases that one worker has in memory.

weight of the network    [ rows of worker 0 | rows of worker 1 | … ]     shape alone, between tests
held by worker 1                            [ rows of worker 1 ]         parameters, gradients, optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True)
class HeldRows:
    """Rows of parameters that a worker holds in memory of their own.

    Attributes:
        like: tensor with the dtype and device of the computation.
        rows: rows of this worker, by `id` of the network's parameter; a parameter without an entry is held whole.
    """

    like: Tensor
    rows: Mapping[int, nn.Parameter] = field(default_factory=dict)

    def of(self, parameter: Tensor, rows: slice) -> tuple[Tensor, slice]:
        """Return the tensor that holds this worker's rows of a parameter, and where in it they are."""
        held = self.rows.get(id(parameter))
        return (parameter, rows) if held is None else (held, slice(None))
