"""The server's side of a strategy, if it has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from polyrhythm.communication.communicator import LentMemory
from polyrhythm.communication.message import Message
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.state import State


@dataclass(frozen=True)
class ServerSetting:
    """What a server part works with.

    Attributes:
        index: of its shard.
        roles: which ranks do what.
        finite: whether all gradients are known to be finite.
        memory: in which parameters may lie, to be shown without being copied; None: none is better than another.
    """

    index: int
    roles: RoleAssignment
    finite: bool = False
    memory: LentMemory | None = None


@dataclass(frozen=True)
class ServerStats:
    """What a server has counted; all of it is reported when the run is over.

    Attributes:
        staleness: gradients applied, by staleness.
        version: updates applied.
        steps: gradients that it holds, by rank, those of earlier sessions included.
        not_finite: gradients left out because they were not finite.
        ejected: pushers let go, once each time.
        dropped: gradients that came too late.
        left_out: by rank, stretches of its steps, `[first, one past the last]`, of which no gradient was applied.
        absent: by rank, stretches of its group's steps, `[first, one past the last]`, taken without it.
        missed: stretches of steps, `[rank, first, one past the last]`, of which a worker's part is in no model: of a
            round in which it was lost, or came.
    """

    staleness: dict[int, int]
    version: int
    steps: dict[int, int]
    not_finite: int = 0
    ejected: int = 0
    dropped: int = 0
    left_out: dict[int, list[list[int]]] = field(default_factory=dict)
    absent: dict[int, list[list[int]]] = field(default_factory=dict)
    missed: list[list[int]] = field(default_factory=list)


class ServerPart(Protocol):
    """The server's side: a message comes in, replies go out. Needs no network to be tested.

    Attributes:
        done: whether all workers have left, and worker 0 has let the servers go.
    """

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""

    def on_message(self, source: int, message: Message) -> list[tuple[int, Message]]:
        """Take a message from a rank; return the replies, with the ranks that they go to.

        The tensors of replies must not change afterwards: they leave while the server goes on.
        """

    def on_loss(self, rank: int) -> list[tuple[int, Message]]:
        """Go on without a worker that is gone; return the replies that its loss sets free.

        It may come back: a successor under the same rank begins with `PULL`. Called only where the strategy
        `goes_on`.
        """

    def state(self) -> State:
        """Return all that a resumed server needs, parameters included."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, before any message."""

    def stats(self) -> ServerStats:
        """Return what it has counted so far."""


class CountsLatestStaleness:
    """A server part that counts itself which stalenesses are new.

    A part may have thousands of pushers, and comparing thousands of ages at every report would take long.
    """

    def latest_staleness(self) -> dict[int, int]:
        """Return how many gradients were applied at which staleness since the last call."""
        raise NotImplementedError


@runtime_checkable
class KeepingPart(ServerPart, Protocol):
    """A server's side that keeps shards of other servers beside its own, so that a lost server may have a successor.

    Attributes:
        whole: whether it has all of its shards, which a successor must be given first.
    """

    @property
    def whole(self) -> bool:
        """Whether it has all of its shards."""

    def rejoin(self, generation: int) -> list[tuple[int, Message]]:
        """Begins as the successor of so many lost servers; gives what asks others for its shards."""

    def on_losses(self, rank: int, losses: int) -> list[tuple[int, Message]]:
        """Do what `on_loss` does, given how many that had the rank are gone."""

    def state_of(self, shard: int) -> State:
        """Return all that a resumed server of a shard needs.

        Raises:
            RefusedMessage: the shard is not here.
        """

    def load_state_of(self, shard: int, state: State) -> None:
        """Take back what `state_of` gave, before any message."""
