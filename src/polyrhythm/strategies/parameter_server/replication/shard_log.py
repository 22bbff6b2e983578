"""Log of a replicated shard.

An entry of a shard's log is a message of a pusher, or the notice of its loss, and what became of it. Both
servers of a shard take the same entries in the same order. A server is nothing but what it makes of them, so
both hold the same numbers, bit for bit: parameters, optimizer, clocks, and what every pusher has read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.message import (
    Message,
    Reason,
    RefusedMessage,
    pack_tensors,
    unpack_tensors,
)
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        shard: number of the shard.
        number: number of the entry, from 0; unanswered entries may be lost with a server, and others then
            have their numbers.
        source: the pusher's rank.
        message: message that it sent; None: it has failed or left.
        replies: replies that it set free.
        version_before: updates before.
        version: updates now.
        applied: gradients that it counted, by staleness.
        digest: digest of the server's whole state then; computed only if it is observed.
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


def _digest(part: ServerSession) -> str:
    if not len(part.values):
        return ""
    tensors, facts = part.exact_state()
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


Observer = Callable[[Entry], None]


class Log:
    """Log of one shard's replica: a server, and the number of messages that it has processed.

    Attributes:
        shard: number of the shard.
        part: server that processes the messages.
        observer: observer of every entry; None: not observed.
        length: number of processed messages.
    """

    def __init__(self, shard: int, part: ServerSession) -> None:
        self.shard = shard
        self.part = part
        self.observer: Observer | None = None
        self.length = 0

    def take(self, source: int, message: Message | None) -> Entry:
        """Let the server take an entry; raise `RefusedMessage`, with nothing changed, if it is none."""
        part, observed = self.part, self.observer is not None
        version, staleness = part.version, Counter(part.staleness) if observed else Counter()
        replies = part.on_loss(source) if message is None else part.on_message(source, message)
        self.length += 1
        number = self.length - 1
        if not observed:
            return Entry(self.shard, number, source, message, replies)
        applied = Counter(part.staleness) - staleness
        return Entry(
            self.shard, number, source, message, replies, version, part.version, applied, _digest(part)
        )

    def report(self, entry: Entry) -> None:
        """Return that an entry can be lost no more."""
        if self.observer is not None:
            self.observer(entry)


def packed(log: Log, requests: Any, losses: Counter[int]) -> Tensor:
    """Pack a copy, `(n,)`, uint8; a vector that several pushers have read is in it once."""
    tensors, facts = log.part.exact_state()
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    same = {name: known for name, known in names.items() if known != name}
    once = {name: tensor for name, tensor in tensors.items() if name not in same}
    stated = {str(pusher): count for pusher, count in losses.items()}
    record = {"server": facts, "same": same, "requests": requests, "losses": stated, "entries": log.length}
    return pack_tensors(once, record)


def unpacked(log: Log, payload: Tensor) -> tuple[Any, Counter[int]]:
    """Put what `packed` gave into the log of an empty copy; return `requests` and `losses`."""
    tensors, facts = unpack_tensors(payload)
    try:
        tensors |= {name: tensors[known] for name, known in facts["same"].items()}
        log.part.load_exact_state((tensors, facts["server"]))
        log.length = facts["entries"]
        return facts["requests"], Counter({int(key): count for key, count in facts["losses"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise RefusedMessage(Reason.MALFORMED, f"a shard that was handed over is none: {error!r}") from None
