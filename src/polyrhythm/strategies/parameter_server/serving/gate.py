"""Gates: a server's decision, after every message of a pusher, which gradients to apply and which pushers to answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.strategies.parameter_server.serving.rounds import Rounds
from polyrhythm.strategies.state import Stateful

CONSISTENCIES = "polyrhythm.strategies.parameter_server.consistency"


class Decision(NamedTuple):
    """Actions of a server.

    Attributes:
        apply: pushers with held gradients that become one update, in the order of summation; a pusher that is
        answer: pushers that get the parameters afterwards.
        acknowledge: pushers that may continue with the copy that they have.
        drop: pushers with a held gradient to be forgotten, before anything is applied.
        step: next step of all answered pushers; None: each one's own next step.
        forget: pushers that repeat their gradients; held ones are dropped.
        at_once: whether answers do not wait for batches that are deferred.
    """

    apply: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    acknowledge: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    step: int | None = None
    forget: tuple[int, ...] = ()
    at_once: bool = False


@cache
def apply_one(pusher: int) -> Decision:
    """Return the decision to apply a pusher's gradient at once, alone, and to answer it."""
    return Decision(apply=(pusher,), answer=(pusher,))


class Gate(Stateful):
    """One server's state of a consistency. Pushers are numbered from 0.

    Attributes:
        rounds: rounds that pushers take together, on all servers the same ones; None where there are no such rounds.
        takes_turns: whether a pusher may contribute only where `check_turn` agrees; always so where there are `rounds`.
        fetches: whether pushers may request the parameters without waiting (`fetch`).
    """

    rounds: Rounds | None = None
    takes_turns: ClassVar[bool] = False
    fetches: ClassVar[bool] = False

    def ask(self, pusher: int, step: int) -> Decision:
        """Decide when a pusher that is about to begin `step` gets the parameters: by default at once."""
        return Decision(answer=(pusher,))

    def arrive(self, pusher: int, step: int) -> Decision:
        """Decide what becomes of a gradient of `pusher`'s step `step`, held from now on: by default let it through."""
        return apply_one(pusher)

    def repeat(self, pusher: int, step: int, due: int) -> Decision | None:
        """Decide on a repeated step, where `due` is the pusher's next.

        Returns:
            None where it counts as the pusher's part of a round: an empty batch, since it has been applied.
        """
        rounds = self.rounds
        return None if rounds is not None and rounds.is_next(pusher, step) else self.ask(pusher, due)

    def fetch(self, pusher: int) -> Decision:
        """Decide when a pusher gets the parameters without waiting, where the gate `fetches`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Take note that a pusher was asked to stop."""

    def know(self, steps: Sequence[int]) -> None:
        """Take note of how many steps of each pusher are known when a run is resumed."""

    def applied(self) -> Decision | None:
        """Decide what follows when a batch is over that was deferred; where the rule `converses`, after any message."""
        return None

    def check_turn(self, pusher: int) -> None:
        """Raise `RefusedMessage` if it is not a pusher's turn to contribute; called only where a gate `takes_turns`."""

    def part(self, pusher: int) -> Decision:
        """Decide what becomes of the last contribution of a pusher that leaves with it."""
        raise NotImplementedError

    def leave(self, pusher: int) -> Decision:
        """Return the pushers unblocked by this departure; a gradient of the departed may still be held."""
        return Decision()

    def join(self, pusher: int) -> None:
        """Count on a pusher again that had left."""

    def enter(self, pusher: int, number: int) -> Decision:
        """Let a pusher in that has joined, at the round that it names; called only where there are `rounds`."""
        raise NotImplementedError


class RoundsGate(Gate):
    """The base of gates with rounds that pushers take together.

    Attributes:
        rounds: rounds, each one update, and entering pushers.
        present: pushers that take part.
        held: pushers with held gradients for the round in progress.
    """

    rounds: Rounds

    def __init__(self, pushers: int) -> None:
        self.rounds = Rounds(pushers)
        self.present = set(range(pushers))
        self.held: set[int] = set()

    def enter(self, pusher: int, number: int) -> Decision:
        self.rounds.accept(pusher, number)
        return self.decide()

    def decide(self) -> Decision:
        """Decide what follows from all that the gate knows now."""
        raise NotImplementedError

    def admit(self, *, alone: bool) -> tuple[int, ...]:
        """Return the replacements that enter now, and take part from now on; see `Rounds.admit`."""
        entered = tuple(self.rounds.admit(alone=alone))
        self.present.update(entered)
        return entered


class Consistency(Config):
    """A consistency's configuration, and the maker of its gates.

    Attributes:
        drops: whether a late gradient is dropped.
        own_updates: whether pushers update their own copies where they are only acknowledged.
    """

    drops: ClassVar[bool] = False

    @property
    def own_updates(self) -> bool:
        """Whether pushers update their own copies where they are only acknowledged."""
        return False

    def check(self, pushers: int) -> None:
        """Raise `RequestError`, with a remedy, where it does not work with `pushers` pushers."""

    @abstractmethod
    def in_step(self) -> bool:
        """Return whether all pushers are at the same step at all times."""

    def waits_for_slower(self) -> bool:
        """Return whether a pusher may have to wait for a slower one."""
        return True

    def steps_ahead(self) -> int:
        """Return by how many steps a pusher may be ahead of the slowest, where it waits for it then; 0: no bound."""
        return 0

    @abstractmethod
    def gathers(self, pushers: int) -> int:
        """Number of gradients of an update."""

    def updates_per_step(self, pushers: int) -> int:
        """Number of updates while every pusher takes one step."""
        return pushers // self.gathers(pushers)

    @abstractmethod
    def spares(self, pushers: int) -> int:
        """Number of pushers that may be lost at once while the others continue."""

    @abstractmethod
    def gate(self, pushers: int) -> Gate:
        """Return a new gate of one server."""


def check_fewer(what: str, given: int, pushers: int) -> None:
    """Raise `RequestError` where a number of pushers is not below all of them."""
    if given >= pushers:
        raise RequestError(
            f"{what} is {given}, but only {pushers} push: ask for {pushers - 1} at most, or for more workers"
        )
