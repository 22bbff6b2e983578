"""Gates: a server's decision, for every gradient that arrives, what to apply and whom to answer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from polyrhythm.specs import Config


@dataclass(frozen=True)
class Decision:
    """What a server must do now.

    Attributes:
        apply: pushers whose held gradients become one update, in the order in which they are summed.
        answer: pushers who get the parameters afterwards.
    """

    apply: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


class Gate(Protocol):
    """One server's state of a consistency. Pushers are numbered from 0."""

    def arrive(self, pusher: int, step: int) -> Decision:
        """A gradient of `pusher`'s step `step` is here and held."""

    def leave(self, pusher: int) -> Decision:
        """A pusher will push no more."""

    def join(self, pusher: int) -> None:
        """A pusher that left is back."""

    def state(self) -> dict[str, Any]:
        """Gives what a resumed gate needs, JSON-able."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""


class Consistency(Config):
    """A consistency's configuration, and the maker of its gates."""

    @abstractmethod
    def in_step(self) -> bool:
        """Whether all pushers are at the same step at all times."""

    @abstractmethod
    def gate(self, pushers: int) -> Gate:
        """Makes one server's gate.

        Args:
            pushers: how many there are.
        """
