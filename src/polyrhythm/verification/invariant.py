"""Invariants: what must hold after every event of a run, whatever goes wrong.

They see from outside what ranks send, receive and hold. Ranks are global ones; a generation counts the processes
that have had a rank before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.errors import RunError
from polyrhythm.strategies.role_assignment import RoleAssignment


class Violation(RunError):
    """An invariant does not hold."""

    def __init__(self, what: str, rank: int, time_s: float, *, expected: object, found: object) -> None:
        super().__init__(f"at {time_s:g} s, rank {rank}: {what}: expected {expected}, found {found}")
        self.rank = rank
        self.time_s = time_s


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is known of a run before it begins.

    Attributes:
        roles: which ranks do what.
        numbers: in the flat vector, which begins with zeros.
        gradient: returns the gradient, `(numbers,)`, of a worker's index and step; sums and means of them are exact,
            and optimizers are plain SGD with rate 1. None: gradients are not known.
        patience_s: virtual seconds within which there must be an update or a step.
        steps: that every worker takes; None: not known.
        units: who draws batches together, by their ranks, where each takes as many as it comes to, and all together
            take `steps` each on average; empty where each worker takes `steps`.
        buckets: of the flat vector.
    """

    roles: RoleAssignment
    numbers: int
    gradient: Callable[[int, int], Tensor] | None = None
    patience_s: float = float("inf")
    steps: int | None = None
    units: tuple[tuple[int, ...], ...] = ()
    buckets: int = 1


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message has arrived, and is about to be received.

    Attributes:
        context: of the communicator that it was sent on: messages of another do not come in between.
    """

    time_s: float
    source: int
    source_generation: int
    to: int
    to_generation: int
    message: Message
    context: int = 0


@dataclass(frozen=True, slots=True)
class Handled:
    """A server has handled a message, or the loss of a worker.

    Attributes:
        time_s: virtual seconds.
        server: its rank.
        source: rank of the sender, or of the lost worker.
        message: None for a loss.
        replies: what it answers.
        version_before: its updates before.
        version: its updates after.
        applied: how many gradients it has counted, by their staleness.
    """

    time_s: float
    server: int
    source: int
    message: Message | None
    replies: list[tuple[int, Message]]
    version_before: int
    version: int
    applied: Counter[int]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A worker has taken a step.

    Attributes:
        time_s: virtual seconds.
        rank: of the worker.
        step: its number.
        vector: `(numbers,)`, the parameters after it; a view, which changes later.
        regrouped: generations of the members of the worker's view by rank; None before anyone has regrouped.
        generation: of the worker.
        view: tells it from another one with the same members; None before anyone has regrouped.
    """

    time_s: float
    rank: int
    step: int
    vector: Tensor
    regrouped: dict[int, int] | None = None
    generation: int = 0
    view: str | int | None = None


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A worker has got another membership view.

    Attributes:
        time_s: virtual seconds.
        rank: of the worker.
        vector: `(numbers,)`, its parameters; a view, which changes later.
        members: generations of all members by rank, in their order.
        steps: that each of them has done, by rank; a successor counts as having done those of the worker that it
            replaces. The others may have gone on since.
    """

    time_s: float
    rank: int
    vector: Tensor
    members: dict[int, int]
    steps: dict[int, int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over.

    Attributes:
        time_s: virtual seconds.
        steps: that every worker had to take, or takes on average where batches are drawn.
        survivors: ranks of the workers that were alive at the end.
        generations: of each of them, by rank.
        taken: where batches are drawn: the steps of every worker, by rank.
    """

    time_s: float
    steps: int
    survivors: tuple[int, ...]
    generations: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] | None = None

    def steps_of(self, rank: int) -> int | None:
        """Return the steps that a survivor had to take.

        None where nobody knows: of a successor where batches are drawn, since others may have drawn its last ones.
        """
        if self.taken is None:
            return self.steps
        return None if self.generations.get(rank) else self.taken[rank]


class Invariant:
    """One rule. A subclass overrides what it has to see, and raises `Violation`."""

    def delivered(self, event: Delivered) -> None:
        """Called when a message arrives, before its receiver has it."""

    def handled(self, event: Handled) -> None:
        """Called when a server has handled a message or a loss."""

    def stepped(self, event: Stepped) -> None:
        """Called after each step of a worker."""

    def regrouped(self, event: Regrouped) -> None:
        """Called when a worker has got another membership view."""

    def ended(self, event: Ended) -> None:
        """Called once, after the run."""
