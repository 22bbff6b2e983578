"""How quantities are written for people: the same on the terminal and in the report."""

from __future__ import annotations

import math

UNKNOWN = "–"
MINUTE_S = 59.95
"""From here on a duration has minutes: less is not rounded up to one."""


def duration(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds, `0:01:40`; less than a minute as `9.5 s`, or `23 ms`.

    What is not finite becomes `–`.
    """
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms" if seconds > 0 else "0 s"
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def whole(number: float) -> str:
    """Write a count or a rate without decimals: `5,812`; `–` if it is not finite."""
    return f"{number:,.0f}" if math.isfinite(number) else UNKNOWN


def percent(fraction: float) -> str:
    """Write a fraction as per cent with one decimal: `90.4 %`; `–` if it is not finite.

    What is not the whole is not written as 100.0 %: 0.9999 is `99.99 %`.
    """
    if not math.isfinite(fraction):
        return UNKNOWN
    decimals = 1
    while decimals < 4 and 0.999 < fraction < 1.0 and round(100 * fraction, decimals) == 100.0:
        decimals += 1
    return f"{100 * fraction:.{decimals}f} %"


def significant(number: float) -> str:
    """Write a number with three significant digits: `0.412`, `1e-05`; `nan` and `inf` stay what they are."""
    return f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """Write a number of things: `1 server`, `12 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
