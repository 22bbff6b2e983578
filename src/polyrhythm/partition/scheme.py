"""Which examples the fully connected layers see together, and who owns them.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997, section 4.

    a    one round:  all b examples of all K workers
    b    K rounds:   all b examples of worker k in round k
    c    K rounds:   examples b r/K ... b (r+1)/K of every worker in round r
"""

from __future__ import annotations

from typing import Literal

Scheme = Literal["a", "b", "c"]


def rounds(scheme: Scheme, workers: int) -> int:
    """Gives how many rounds a step has."""
    return 1 if scheme == "a" else workers


def sends(scheme: Scheme, worker: int, number: int) -> bool:
    """Tells whether a worker has examples in a round, as far as that can be told without its batch."""
    return scheme != "b" or worker == number


def place(scheme: Scheme, batch: int, workers: int, number: int) -> slice:
    """Gives the places in its batch of a worker's examples in a round in which it sends.

    Args:
        scheme: a, b or c.
        batch: the worker's examples in the step.
        workers: how many there are.
        number: of the round.
    """
    if scheme == "c":
        return slice(batch * number // workers, batch * (number + 1) // workers)
    return slice(0, batch)
