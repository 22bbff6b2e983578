"""What a group of workers that go in step has for servers above it, which other groups share (`mixed`)."""

from __future__ import annotations

from enum import Enum


class Offer(Enum):
    """What it has, and when.

    Attributes:
        GRADIENTS: the mean of its gradients, at every step, before anybody has updated anything with it.
        MODELS: models that are equal at the end of a round, and may be others when the next one begins.
        NOTHING: neither.
    """

    GRADIENTS = "gradients"
    MODELS = "models"
    NOTHING = "nothing"
