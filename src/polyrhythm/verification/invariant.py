"""Invariants: what must hold after every event of a run, whatever goes wrong.

They see from outside what ranks send, receive and hold. Ranks are global ones; an incarnation counts the processes
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

    def __init__(self, what: str, *, rank: int, time_s: float, expected: object, found: object) -> None:
        super().__init__(f"at {time_s:g} s, rank {rank}: {what}: expected {expected}, found {found}")
        self.rank = rank
        self.time_s = time_s


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is known of a run before it begins.

    Attributes:
        cast: which ranks do what.
        numbers: in the flat vector, which begins with zeros.
        gradient: returns the gradient, `(numbers,)`, of a worker's index and step; sums and means of them are exact,
            and optimizers are plain SGD with rate 1. None: gradients are not known.
        patience_s: virtual seconds within which there must be an update or a step.
        steps: that every worker takes; None: not known.
    """

    cast: RoleAssignment
    numbers: int
    gradient: Callable[[int, int], Tensor] | None = None
    patience_s: float = float("inf")
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message has arrived, and is about to be received."""

    time_s: float
    source: int
    source_incarnation: int
    to: int
    to_incarnation: int
    message: Message


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
        regrouped: incarnations of the members of the worker's view by rank; None before anyone has regrouped.
        incarnation: of the worker.
        view: tells it from another one with the same members; None before anyone has regrouped.
    """

    time_s: float
    rank: int
    step: int
    vector: Tensor
    regrouped: dict[int, int] | None = None
    incarnation: int = 0
    view: str | int | None = None


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A worker has got another membership view.

    Attributes:
        time_s: virtual seconds.
        rank: of the worker.
        vector: `(numbers,)`, its parameters; a view, which changes later.
        members: incarnations of all members by rank, in their order.
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
        steps: that every worker had to take.
        survivors: ranks of the workers that were alive at the end.
        incarnations: of each of them, by rank.
    """

    time_s: float
    steps: int
    survivors: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


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
