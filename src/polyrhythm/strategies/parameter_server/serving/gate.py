"""Gates: a server's decision, for everything that comes from a pusher, what to apply and whom to answer."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.strategies.parameter_server.serving.membership import Rounds

CONSISTENCIES = "polyrhythm.strategies.parameter_server.consistency"


class Decision(NamedTuple):
    """What a server must do now.

    Attributes:
        apply: pushers whose held gradients become one update, in the order in which they are summed; who is named
            twice, with two of its gradients.
        answer: pushers who get the parameters afterwards.
        acknowledge: pushers who may go on with the copy that they have.
        drop: pushers of whom a held gradient is forgotten, before anything is applied.
        step: that everyone who is answered goes on with; None: each with the one after what it has done.
    """

    apply: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    acknowledge: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    step: int | None = None


@cache
def let_through(pusher: int) -> Decision:
    """Gives the decision to apply a pusher's gradient at once, alone, and to answer it."""
    return Decision(apply=(pusher,), answer=(pusher,))


class Gate(Protocol):
    """One server's state of a consistency. Pushers are numbered from 0."""

    def ask(self, pusher: int, step: int) -> Decision:
        """A pusher that would go on with this step asks for the parameters."""

    def arrive(self, pusher: int, step: int) -> Decision:
        """A gradient of `pusher`'s step `step` is here and held."""

    def leave(self, pusher: int) -> Decision:
        """A pusher will push no more; one that is lost may have a held gradient."""

    def join(self, pusher: int) -> None:
        """A pusher that left is back."""

    def state(self) -> dict[str, Any]:
        """Gives what a resumed gate needs, JSON-able."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""


@runtime_checkable
class RoundGate(Gate, Protocol):
    """A gate whose pushers take rounds together, on all servers the same ones.

    Attributes:
        rounds: and those who are to come in.
    """

    rounds: Rounds

    def enter(self, pusher: int, number: int) -> Decision:
        """A pusher that has joined says at which round it comes in."""


class Consistency(Config):
    """A consistency's configuration, and the maker of its gates.

    Attributes:
        drops: whether a gradient that comes too late is dropped.
        own_updates: whether pushers update their own copies where they are only acknowledged.
    """

    drops: ClassVar[bool] = False

    @property
    def own_updates(self) -> bool:
        """Whether pushers update their own copies where they are only acknowledged."""
        return False

    def check(self, pushers: int) -> None:
        """Refuses what cannot be right with so many pushers.

        Raises:
            RequestError: with the reason and what would work.
        """

    @abstractmethod
    def in_step(self) -> bool:
        """Whether all pushers are at the same step at all times."""

    def waits_for_slower(self) -> bool:
        """Whether a pusher may have to wait for a slower one."""
        return True

    @abstractmethod
    def gathers(self, pushers: int) -> int:
        """How many gradients an update is made of."""

    def updates_per_step(self, pushers: int) -> int:
        """How many updates the parameters get while every pusher takes one step."""
        return pushers // self.gathers(pushers)

    @abstractmethod
    def spares(self, pushers: int) -> int:
        """How many pushers may be lost at once while the others go on."""

    def all_at(self, pushers: int, step: int) -> dict[str, Any]:
        """Gives the state of a gate of so many pushers that are all to begin with a step, and holds nothing."""
        return {}

    @abstractmethod
    def gate(self, pushers: int) -> Gate:
        """Makes one server's gate.

        Args:
            pushers: how many there are.
        """


def check_fewer(what: str, given: int, pushers: int) -> None:
    """Refuses a number of pushers that is not below all of them.

    Raises:
        RequestError: it is not.
    """
    if given >= pushers:
        raise RequestError(
            f"{what} is {given}, but only {pushers} push: ask for {pushers - 1} at most, or for more workers"
        )
