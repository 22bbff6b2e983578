"""An entry of a shard's log: a message of a pusher, or the news that it is gone, and what became of it.

Both servers of a shard take the same entries in the same order. A server is nothing but what it makes of them, so both
hold the same numbers, bit for bit: parameters, optimiser, clocks, and what every pusher has read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from polyrhythm.communication.message import Message
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        shard: its number.
        number: of the entry, from 0; entries that nobody was told of may be lost with a server, and others then have
            their numbers.
        source: the pusher's rank.
        message: that it sent; None: it is gone.
        replies: that it set free.
        version_before: updates before.
        version: updates now.
        applied: gradients that it counted, by staleness.
        digest: of all that the server holds then; made where somebody watches.
    """

    shard: int
    number: int
    source: int
    message: Message | None
    replies: list[Reply]
    version_before: int = 0
    version: int = 0
    applied: Counter[int] = field(default_factory=Counter)
    digest: str = ""


def _digest(part: ShardServer) -> str:
    if not len(part.values):
        return ""
    tensors, facts = part.exact_state()
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


Told = Callable[[Entry], None]


class Log:
    """A server of one shard, and how many entries it has taken.

    Args:
        shard: its number.
        part: takes them.

    Attributes:
        shard: its number.
        part: takes them.
        told: hears of every entry, where somebody watches.
        length: entries that have been taken.
    """

    def __init__(self, shard: int, part: ShardServer) -> None:
        self.shard = shard
        self.part = part
        self.told: Told | None = None
        self.length = 0

    def take(self, source: int, message: Message | None) -> Entry:
        """Lets the server take an entry.

        Raises:
            RefusedMessage: it is none; nothing has been changed.
        """
        part, told = self.part, self.told is not None
        version, staleness = part.version, Counter(part.staleness) if told else Counter()
        replies = part.on_loss(source) if message is None else part.on_message(source, message)
        self.length += 1
        number = self.length - 1
        if not told:
            return Entry(self.shard, number, source, message, replies)
        applied = part.staleness - staleness
        return Entry(
            self.shard, number, source, message, replies, version, part.version, applied, _digest(part)
        )

    def tell(self, entry: Entry) -> None:
        """Says that an entry can be lost no more."""
        if self.told is not None:
            self.told(entry)
