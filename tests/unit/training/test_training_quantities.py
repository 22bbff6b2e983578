"""The ranges of numbers in configurations."""

import pytest
from pydantic import TypeAdapter, ValidationError

from polyrhythm.training.quantities import Count, Decay, Fraction, InnerFraction, NonNegative, Positive


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Positive, [1e-300, 1, "1e-3"], [0, -1, "nan", "inf"]),
        (NonNegative, [0, 0.5], [-1e-300, "nan", "inf"]),
        (Decay, [0, 0.999], [1, -0.1, "nan"]),
        (Fraction, [0, 1], [1.1, -0.1, "nan"]),
        (InnerFraction, [0.5], [0, 1, "nan"]),
        (Count, [1, 256], [0, -1, 2.5, "nan"]),
    ],
)
def test_ranges(kind, good, bad):
    adapter = TypeAdapter(kind)
    assert [adapter.validate_python(value) for value in good] == [float(value) for value in good]
    for value in [*bad, True, None, "many"]:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)
