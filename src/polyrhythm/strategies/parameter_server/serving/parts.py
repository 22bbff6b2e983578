"""Servers add up the parts of what must be known of whole gradients: each its shard's part of the distances.

server 0 ── part ──▶ all others        every one waits for all parts, and adds them up in the order of the servers:
server 1 ── part ──▶ all others        the same bits, and so the same choice, on all

A part is a square of numbers; with one row more, where it says of which gradients it is. An empty one says that a
server has nothing in this round.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.serving.admission import payload


class Parts:
    """One server's end.

    Args:
        servers: the ranks of all; a server alone needs no others.
        index: of this one.
        unnamed: of how many gradients a part need not say which they are, and parts may be of fewer; None: all parts
            are of equally many.
    """

    def __init__(self, servers: tuple[int, ...], index: int, *, unnamed: int | None = None) -> None:
        self._unnamed = unnamed
        self._servers = servers or (-1,)
        self._own = self._servers[index]
        self._round = 0
        self._heard: dict[tuple[int, int], Tensor] = {}

    def knows(self, rank: int) -> bool:
        """Whether a rank is another server."""
        return rank in self._servers and rank != self._own

    def offer(self, part: Tensor) -> list[tuple[int, Message]]:
        """Takes this server's part, `(k, k)` or `(k + 1, k)`, float64; gives the messages that tell the others."""
        self._heard[self._round, self._own] = part
        raw = part.flatten().view(torch.uint8)  # as it is, whatever a parameter of the model stands for
        message = Message(Kind.VECTOR, raw, step=self._round)
        return [(rank, message) for rank in self._servers if rank != self._own]

    def hear(self, source: int, message: Message) -> None:
        """Takes another server's part, which may be one round ahead.

        Raises:
            RefusedMessage: it is no square of numbers, of another round, or there already.
        """
        raw = payload(message)
        numbers = raw.numel() // 8
        size = isqrt(numbers)
        rows = size if self._unnamed in (None, size) or not size else size + 1
        if raw.dtype != torch.uint8 or raw.numel() != 8 * rows * size:
            raise RefusedMessage(
                Reason.PAYLOAD, f"a part of {raw.numel()} numbers, {raw.dtype}, is no square"
            )
        own = self._heard.get((self._round, self._own)) if self._unnamed is None else None
        alike = own is None or not (size and len(own)) or len(own) == size
        if message.step == self._round and not alike:
            raise RefusedMessage(
                Reason.PAYLOAD, f"a part of {size} gradients came, and others are of another number"
            )
        if not 0 <= message.step - self._round <= 1 or (message.step, source) in self._heard:
            raise RefusedMessage(
                Reason.STEP, f"a part of round {message.step} came from rank {source} in round {self._round}"
            )
        self._heard[message.step, source] = raw.view(torch.float64).view(rows, size)

    def whole(self) -> Tensor | None:
        """Gives the sum of all parts once they are there, empty if one of them is; then the next round begins."""
        found = self.all()
        if found is None:
            return None
        if not all(map(len, found)):
            return torch.zeros(0, 0, dtype=torch.float64)
        total = torch.zeros_like(found[0])
        for part in found:
            total += part
        return total

    def all(self) -> list[Tensor] | None:
        """Gives all parts, in the servers' order, once they are there; then the next round begins."""
        parts = [self._heard.get((self._round, rank)) for rank in self._servers]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        for rank in self._servers:
            del self._heard[self._round, rank]
        self._round += 1
        return found
