"""Servers exchange their shards' parts of what must be known of whole gradients.

    server 0 ── part ──▶ all others        every one waits for all parts, and adds them up in the order of the
    server 1 ── part ──▶ all others        servers: the same bits, and so the same choice, on all

A part is a square of numbers: a shard's part of the gradients' distances, or of scalar products. One more row
identifies its gradients. Instead, a server may send names alone, to find out first which gradients all of
them have.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import payload


class Part(NamedTuple):
    """One server's part of a round.

    Attributes:
        round: round of the exchange, from 0.
        raw: bytes, uint8, so that the numbers stay as they are whatever a parameter of the model stands for.
        names: whether these are the names of gradients, `(k,)`, int64, and not numbers, float64.
    """

    round: int
    raw: Tensor
    names: bool

    def message(self) -> Message:
        """Pack it to be sent."""
        return Message(Kind.VECTOR, self.raw, version=int(self.names), step=self.round)

    @classmethod
    def of(cls, message: Message) -> Part:
        """Unpack the result of `message`; raise `RefusedMessage` if it has no tensor."""
        return cls(message.step, payload(message), message.version == 1)


class DistanceExchange:
    """One server's end of the exchange of parts.

    Args:
        servers: the ranks of all; a server alone needs no others.
        unnamed: number of gradients of a part that need not be identified, since parts may be of fewer; None:
            all parts are of equally many.
    """

    def __init__(self, servers: tuple[int, ...], index: int, *, unnamed: int | None = None) -> None:
        self._unnamed = unnamed
        self._servers = servers or (-1,)
        self._own = self._servers[index]
        self._round = 0
        self._offered = 0
        self._latest: dict[tuple[int, int], Tensor] = {}

    def knows(self, rank: int) -> bool:
        """Return whether a rank is another server."""
        return rank in self._servers and rank != self._own

    def offer(self, part: Tensor) -> list[tuple[int, Message]]:
        """Take this server's part, `(k, k)` or `(k + 1, k)`, float64; return the messages for the others.

        Names instead of a part are `(k,)`, int64.
        """
        self._latest[self._offered, self._own] = part
        message = Part(self._offered, part.flatten().view(torch.uint8), names=part.dim() == 1).message()
        self._offered += 1  # the round may be over for this server before others have sent theirs
        return [(rank, message) for rank in self._servers if rank != self._own]

    def on_message(self, source: int, message: Message) -> None:
        """Take another server's part; raise `RefusedMessage` unless it is a square of this round or the next."""
        stated = Part.of(message)
        part = self._named(stated.raw) if stated.names else self._square(stated)
        if not 0 <= stated.round - self._round <= 1 or (stated.round, source) in self._latest:
            raise RefusedMessage(
                Reason.STEP,
                f"a part of round {stated.round} arrived from rank {source} in round {self._round}",
            )
        self._latest[stated.round, source] = part

    def _named(self, raw: Tensor) -> Tensor:
        if raw.dtype != torch.uint8 or raw.numel() % 8 or self._unnamed is not None:
            raise RefusedMessage(Reason.PAYLOAD, f"{raw.numel()} numbers, {raw.dtype}, are no names")
        return raw.view(torch.int64)

    def _square(self, part: Part) -> Tensor:
        raw = part.raw
        size = isqrt(raw.numel() // 8)
        rows = size if self._unnamed in (None, size) or not size else size + 1
        if raw.dtype != torch.uint8 or raw.numel() != 8 * rows * size:
            raise RefusedMessage(
                Reason.PAYLOAD, f"a part of {raw.numel()} numbers, {raw.dtype}, is no square"
            )
        own = self._latest.get((self._round, self._own)) if self._unnamed is None else None
        if part.round == self._round and own is not None and own.dim() == 2 and len(own) != size:
            raise RefusedMessage(
                Reason.PAYLOAD, f"a part of {size} gradients arrived where {len(own)} are compared"
            )
        return raw.view(torch.float64).view(rows, size)

    def all(self) -> list[Tensor] | None:
        """Return all parts, in the servers' order, once they have arrived; then the next round begins."""
        parts = [self._latest.get((self._round, rank)) for rank in self._servers]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        for rank in self._servers:
            del self._latest[self._round, rank]
        self._round += 1
        return found


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of all servers' parts, `(k, k)`, in their order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total
