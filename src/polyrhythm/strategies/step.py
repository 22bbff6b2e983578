"""A step of one worker, as its strategy hears of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Step:
    """One gradient of one worker, known before it is computed.

    Nobody changes it; a frozen one takes four times as long to make, and every step makes one.

    Attributes:
        number: the worker's steps before this one.
        weight: samples that the gradient is the mean of, in units of a full batch; 0 for an empty batch.
        stop: whether this worker has been asked to stop.
    """

    number: int
    weight: float = 1.0
    stop: bool = False
