"""Invariants: what must hold after every event of a run, whatever goes wrong.

They see from outside what ranks send, hear and hold; no strategy knows that it is watched. Ranks are global ones, and
an incarnation counts the ranks that came before under the same number.
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
    """Something happened that must not."""

    def __init__(self, what: str, *, rank: int, time_s: float, expected: object, found: object) -> None:
        super().__init__(f"at {time_s:g} s, rank {rank}: {what}: expected {expected}, found {found}")
        self.rank = rank
        self.time_s = time_s


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which a run is watched.

    Attributes:
        cast: who does what.
        numbers: in the flat vector, which begins with zeros.
        gradient: gives the gradient, `(numbers,)`, of a worker's index and step, of which all means and sums are exact;
            plain steps of rate 1 are made with it. None: gradients are not known.
        patience_s: within which something must get on.
        steps: that every worker takes; None: nobody can tell.
    """

    cast: RoleAssignment
    numbers: int
    gradient: Callable[[int, int], Tensor] | None = None
    patience_s: float = float("inf")
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message is there."""

    time_s: float
    source: int
    source_incarnation: int
    to: int
    to_incarnation: int
    message: Message


@dataclass(frozen=True, slots=True)
class Handled:
    """A server part took a message, or the news that a worker is gone.

    Attributes:
        time_s: when.
        server: its rank.
        source: of the message, or who is gone.
        message: None for such news.
        replies: what it gave.
        version_before: its updates before.
        version: its updates now.
        applied: gradients that it counted, by staleness.
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
    """A worker has exchanged and updated.

    Attributes:
        time_s: when.
        rank: of the worker.
        step: the step's number.
        vector: `(numbers,)`, its parameters now; changes later.
        regrouped: incarnations of the workers in step with it since they have regrouped, by rank; None before.
        incarnation: how many have had the worker's rank before it.
        formation: tells those who go in step now from the same ones before or after; 0 until they have regrouped.
    """

    time_s: float
    rank: int
    step: int
    vector: Tensor
    regrouped: dict[int, int] | None = None
    incarnation: int = 0
    formation: int = 0


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A worker goes on with others than before.

    Attributes:
        time_s: when.
        rank: of the worker.
        vector: `(numbers,)`, its parameters now; changes later.
        members: incarnations of all who go on together, by rank, in their order.
        steps: that each of them has done, or a successor takes for done; those of others may have taken some since.
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
        time_s: when.
        steps: that every worker had to take.
        survivors: ranks of the workers that have left of their own accord.
        incarnations: by rank, how many have had each one's number before it.
    """

    time_s: float
    steps: int
    survivors: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


class Invariant:
    """One rule; a subclass hears what it wants to hear, and raises `Violation`."""

    def delivered(self, event: Delivered) -> None:
        """A message is there, and nobody has taken it."""

    def handled(self, event: Handled) -> None:
        """A server part took something."""

    def stepped(self, event: Stepped) -> None:
        """A worker's step is over."""

    def regrouped(self, event: Regrouped) -> None:
        """A worker goes on with others."""

    def ended(self, event: Ended) -> None:
        """The run is over."""
