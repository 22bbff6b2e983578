"""The server's side of a strategy, if it has one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from polyrhythm.communication.message import Message
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.state import State


@dataclass(frozen=True)
class ServerSetting:
    """What a server part works with.

    Attributes:
        index: of its shard.
        cast: which ranks do what.
        finite: whether all gradients are known to be finite.
    """

    index: int
    cast: RoleAssignment
    finite: bool = False


class ServerPart(Protocol):
    """The server's side: a message comes in, replies go out. Needs no network to be tested.

    Attributes:
        staleness: how many gradients were applied at which staleness.
        version: updates applied so far.
        done: whether all workers have left.
        steps: how many gradients of each rank it holds.
    """

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness."""

    @property
    def version(self) -> int:
        """Updates applied so far."""

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each rank it holds, those of earlier sessions included."""

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""

    def on_message(self, source: int, message: Message) -> list[tuple[int, Message]]:
        """Takes a message from a rank and gives the replies, with the ranks that they go to.

        The tensors of replies must not change afterwards: they leave while the server goes on.
        """

    def on_loss(self, rank: int) -> list[tuple[int, Message]]:
        """A worker is gone; gives the replies that this sets free.

        It may come back: a successor under the same rank begins with `PULL`. Called only where the strategy
        `goes_on`.
        """

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, before any message."""


@runtime_checkable
class KeepingPart(ServerPart, Protocol):
    """A server's side that keeps shards of other servers beside its own, so that a lost server may have a successor.

    Attributes:
        whole: whether it has all of its shards, which a successor must be given first.
    """

    @property
    def whole(self) -> bool:
        """Whether it has all of its shards."""

    def rejoin(self, incarnation: int) -> list[tuple[int, Message]]:
        """Begins as the successor of so many lost servers; gives what asks others for its shards."""

    def on_losses(self, rank: int, losses: int) -> list[tuple[int, Message]]:
        """Hears what `on_loss` says, and how many that had the rank are gone."""

    def state_of(self, shard: int) -> State:
        """Gives all that a resumed server of a shard needs.

        Raises:
            RefusedMessage: the shard is not here.
        """

    def load_state_of(self, shard: int, state: State) -> None:
        """Takes back what `state_of` gave, before any message."""
