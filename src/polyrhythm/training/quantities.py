"""The kinds of number that the fields of optimizers and schedules hold, each with its range."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _refuse_truth(value: Any) -> Any:
    # pydantic would read `lr=true` as 1.0
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


_number = BeforeValidator(_refuse_truth)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _number]
"""Above 0 and finite."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _number]
"""0 or above, and finite."""

Decay = Annotated[float, Field(ge=0, lt=1), _number]
"""Share of a running value that is kept at each step: at least 0, below 1."""

Fraction = Annotated[float, Field(ge=0, le=1), _number]
"""A share: from 0 to 1."""

InnerFraction = Annotated[float, Field(gt=0, lt=1), _number]
"""A share that is neither nothing nor all."""

Count = Annotated[int, Field(ge=1), _number]
"""A whole number, 1 or above."""
