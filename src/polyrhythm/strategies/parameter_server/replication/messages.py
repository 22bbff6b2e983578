"""Messages between servers of replicated shards, and tags of those to workers; see `replicated_server`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import Tensor

from polyrhythm.communication.message import (
    Kind,
    Message,
    Reason,
    RefusedMessage,
)

KEPT, GREETING = 1, 2
"""Tags of answers about the previous server's shard, and of a replacement's announcement to workers."""


@dataclass(frozen=True)
class Relay:
    """Subject of its sender's next message: a pusher's entry in a shard's log, or a shard of a lost server.

    Attributes:
        shard: number of the shard.
        pusher: number of the pusher.
        losses: number of losses of the other copy, as the pusher knows, where it is the sender.
        again: whether it is no entry, but a repeated answer to the pusher.
    """

    shard: int
    pusher: int
    losses: int = 1
    again: bool = False

    def message(self) -> Message:
        """Pack it to be sent."""
        weight = float(self.losses)
        return Message(Kind.RELAY, step=self.pusher, version=self.shard, weight=weight, stop=self.again)

    @classmethod
    def of(cls, source: int, message: Message) -> Relay:
        """Read the result of `message`; raise `RefusedMessage` for an impossible number of losses."""
        if not 0 <= message.weight < inf:
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed after {message.weight} losses")
        return cls(message.version, message.step, int(message.weight), message.stop)


class AboutShard(NamedTuple):
    """A word between the two servers of a shard that needs nothing but its number.

    Attributes:
        kind: COPY asks for the shard; else it acknowledges an entry of this kind.
        shard: number of the shard.
    """

    kind: Kind
    shard: int

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(self.kind, version=self.shard)

    @classmethod
    def of(cls, message: Message) -> AboutShard:
        """Unpack the result of `message`."""
        return cls(message.kind, message.version)


class Handover(NamedTuple):
    """A whole copy of a shard, for the replacement of the server that had the other.

    Attributes:
        shard: number of the shard.
        generation: generation of the server that gives it: how many servers it succeeds.
        copy: packed by `packed`; None if it is missing.
    """

    shard: int
    generation: int
    copy: Tensor | None

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.STATE, self.copy, version=self.shard, step=self.generation)

    @classmethod
    def of(cls, message: Message) -> Handover:
        """Unpack the result of `message`."""
        return cls(message.version, message.step, message.tensor)


class PusherLost(NamedTuple):
    """An entry in the log of a shard: successive losses of a pusher's rank, instead of a message of it.

    Attributes:
        losses: number of losses.
    """

    losses: int

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.LOST, version=self.losses)

    @classmethod
    def of(cls, message: Message) -> PusherLost | None:
        """Unpack the result of `message`; None for an entry that is a pusher's own message."""
        return cls(message.version) if message.kind is Kind.LOST else None
