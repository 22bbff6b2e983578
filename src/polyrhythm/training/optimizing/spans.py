"""Parts of the flat vector, each with the options that its optimiser has there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polyrhythm.errors import RequestError


@dataclass(frozen=True)
class Span:
    """A part of the vector with options of its own.

    Attributes:
        start: its first number.
        stop: one past its last number.
        options: what the optimiser's `param_groups` entry holds, less the parameters.
    """

    start: int
    stop: int
    options: dict[str, Any]


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Makes one span of neighbours with the same options."""
    whole: list[Span] = []
    for span in spans:
        if whole and whole[-1].stop == span.start and whole[-1].options == span.options:
            whole[-1] = Span(whole[-1].start, span.stop, span.options)
        else:
            whole.append(span)
    return tuple(whole)


def check_spans(spans: Iterable[Span]) -> None:
    """Refuses spans that overlap, are out of order, or are none.

    Raises:
        RequestError: they are.
    """
    end = 0
    for span in spans:
        if type(span.start) is not int or type(span.stop) is not int or not end <= span.start < span.stop:
            raise RequestError(
                "the spans of an optimiser plan must be whole numbers, in order and without overlap"
            )
        end = span.stop
