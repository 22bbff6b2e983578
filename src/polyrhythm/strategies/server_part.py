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
    """Arguments of a server part's constructor.

    Attributes:
        index: index of its shard.
        roles: roles of the ranks.
        finite: whether all gradients are known to be finite.
        memory: buffer that parameters may live in, so that they are shared without a copy; None: ordinary
            memory.
    """

    index: int
    roles: RoleAssignment
    finite: bool = False
    memory: LentMemory | None = None


@dataclass(frozen=True)
class ServerStats:
    """Counters of a server; all of them are reported at the end of the run.

    Attributes:
        staleness: gradients applied, by staleness.
        version: updates applied.
        steps: gradients that it holds, by rank, those of earlier sessions included.
        not_finite: gradients left out because they were not finite.
        ejected: evicted pushers, once per eviction.
        dropped: late gradients.
        left_out: per rank, ranges of its steps, `[first, last + 1]`, without an applied gradient.
        absent: per rank, ranges of its group's steps, `[first, last + 1]`, taken without it.
        missed: stretches of steps, `[rank, first, last + 1]`, in which a worker's part is in no model,
            because it failed or joined in the round.
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
    """The server's side of a strategy: maps a message to replies. Testable without a network.

    Attributes:
        done: whether all workers have left, and rank 0 has dismissed the servers.
    """

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""

    def on_message(self, source: int, message: Message) -> list[tuple[int, Message]]:
        """Process a message from a rank; return the replies with their destination ranks.

        The tensors of replies must not change afterwards: they are sent while the server continues.
        """

    def on_loss(self, rank: int) -> list[tuple[int, Message]]:
        """Continue without a failed worker; return the replies that were waiting for it.

        A replacement with the same rank may join: it begins with `PULL`. Called only where the strategy `continues`.
        """

    def state(self) -> State:
        """Return all that a resumed server needs, parameters included."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, before any message."""

    def stats(self) -> ServerStats:
        """Return its counters."""


class CountsLatestStaleness:
    """A server part that counts itself which stalenesses are new.

    A part may have thousands of pushers, and comparing thousands of ages at every report would take long.
    """

    def latest_staleness(self) -> dict[int, int]:
        """Return how many gradients were applied at which staleness since the last call."""
        raise NotImplementedError


@runtime_checkable
class KeepingPart(ServerPart, Protocol):
    """A server part that also keeps shards of other servers, so that a failed server can be replaced.

    Attributes:
        whole: whether it has all of its shards; a replacement receives them first.
    """

    @property
    def whole(self) -> bool:
        """Whether it has all of its shards."""

    def rejoin(self, generation: int) -> list[tuple[int, Message]]:
        """Begin as the replacement of a failed server with `generation` predecessors; return the shard requests."""

    def on_losses(self, rank: int, losses: int) -> list[tuple[int, Message]]:
        """Do what `on_loss` does, given how many that had the rank are gone."""

    def state_of(self, shard: int) -> State:
        """Return all that a resumed server of a shard needs.

        Raises:
            RefusedMessage: the shard is not here.
        """

    def load_state_of(self, shard: int, state: State) -> None:
        """Take back what `state_of` gave, before any message."""
