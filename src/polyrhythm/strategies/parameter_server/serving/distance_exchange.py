"""Servers exchange their shards' parts of what must be known of whole gradients, and updates that wait for it.

    server 0 ── part ──▶ all others        every one waits for all parts, and adds them up in the order of the
    server 1 ── part ──▶ all others        servers: the same bits, and so the same choice, on all

A part is a square of numbers: a shard's part of the gradients' distances, or of scalar products. One more row
says of which gradients it is. In its place a server may send names alone, to find out first whose gradients
all of them have (`Parts`).

For aggregators that look at whole gradients, an update waits until all servers have compared the same ones
(`Comparison`). Every server says of every round which gradients it has, with its part of their distances.
What a lost worker had pushed may be on one server and not on another: then none of them takes it, and it
comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.rules.aggregator import squared_distances
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.gate import Decision
from polyrhythm.strategies.parameter_server.serving.membership import Rounds
from polyrhythm.strategies.parameter_server.serving.shard import Pushed

_NAMES = 1


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
        self._offered = 0
        self._heard: dict[tuple[int, int], Tensor] = {}

    def knows(self, rank: int) -> bool:
        """Whether a rank is another server."""
        return rank in self._servers and rank != self._own

    def offer(self, part: Tensor) -> list[tuple[int, Message]]:
        """Takes this server's part, `(k, k)` or `(k + 1, k)`, float64; gives the messages that tell the others.

        Names in its place are `(k,)`, int64.
        """
        self._heard[self._offered, self._own] = part
        raw = part.flatten().view(torch.uint8)  # as it is, whatever a parameter of the model stands for
        message = Message(Kind.VECTOR, raw, version=_NAMES if part.dim() == 1 else 0, step=self._offered)
        self._offered += 1  # the round may be over for this server before others have said what they have
        return [(rank, message) for rank in self._servers if rank != self._own]

    def on_message(self, source: int, message: Message) -> None:
        """Takes another server's part, which may be one round ahead.

        Raises:
            RefusedMessage: it is no square of numbers, of another round, or there already.
        """
        part = self._named(message) if message.version == _NAMES else self._square(message)
        if not 0 <= message.step - self._round <= 1 or (message.step, source) in self._heard:
            raise RefusedMessage(
                Reason.STEP, f"a part of round {message.step} came from rank {source} in round {self._round}"
            )
        self._heard[message.step, source] = part

    def _named(self, message: Message) -> Tensor:
        raw = payload(message)
        if raw.dtype != torch.uint8 or raw.numel() % 8 or self._unnamed is not None:
            raise RefusedMessage(Reason.PAYLOAD, f"{raw.numel()} numbers, {raw.dtype}, are no names")
        return raw.view(torch.int64)

    def _square(self, message: Message) -> Tensor:
        raw = payload(message)
        size = isqrt(raw.numel() // 8)
        rows = size if self._unnamed in (None, size) or not size else size + 1
        if raw.dtype != torch.uint8 or raw.numel() != 8 * rows * size:
            raise RefusedMessage(
                Reason.PAYLOAD, f"a part of {raw.numel()} numbers, {raw.dtype}, is no square"
            )
        own = self._heard.get((self._round, self._own)) if self._unnamed is None else None
        if message.step == self._round and own is not None and own.dim() == 2 and len(own) != size:
            raise RefusedMessage(
                Reason.PAYLOAD, f"a part of {size} gradients came where {len(own)} are compared"
            )
        return raw.view(torch.float64).view(rows, size)

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


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Gives the sum of all servers' parts, `(k, k)`, in their order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


Reply = tuple[int, Message]


class Agreed(NamedTuple):
    """What becomes of a decision.

    Attributes:
        taken: gradients that all servers have.
        decision: whom to answer then.
        distances: `(k, k)`, between those of them that weigh something.
    """

    taken: list[Pushed]
    decision: Decision
    distances: Tensor


class Comparison:
    """One server's decisions, in their order, of which updates wait for the other servers.

    Args:
        servers: the ranks of all; a server alone needs no others.
        index: of this one.
        pushers: how many there are.
    """

    def __init__(self, servers: tuple[int, ...], index: int, pushers: int) -> None:
        self._parts = Parts(servers, index, unnamed=pushers)
        self._alone = len(servers) <= 1
        self._everyone = list(range(pushers))
        self._rounds = 0
        self._waiting: deque[tuple[list[Pushed] | None, Decision]] = deque()

    @property
    def busy(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def knows(self, rank: int) -> bool:
        """Whether a rank is another server."""
        return self._parts.knows(rank)

    def on_message(self, source: int, message: Message) -> None:
        """Takes another server's part.

        Raises:
            RefusedMessage: it cannot be one.
        """
        self._parts.on_message(source, message)

    def take(self, taken: list[Pushed], decision: Decision, rounds: Rounds | None) -> list[Reply]:
        """Lets a decision wait until all servers have said which gradients of its round they have.

        Args:
            taken: gradients that it takes.
            decision: of the gate.
            rounds: of the gate, if it has any; those that were not taken here are over.

        Returns:
            What tells the other servers.
        """
        is_round = bool(taken) and (rounds is None or not set(decision.apply).isdisjoint(decision.answer))
        told = [] if rounds is None else self._skip(rounds.number - is_round)
        if is_round:
            return told + self._put(taken, decision)
        self._waiting.append((None, decision))  # what only lost ones had pushed comes again
        return told

    def _put(self, taken: list[Pushed], decision: Decision) -> list[Reply]:
        self._waiting.append((taken, decision))
        self._rounds += 1
        weighty = [entry for entry in taken if entry.message.weight > 0]
        part = squared_distances([payload(entry.message) for entry in weighty])
        names = [entry.pusher for entry in weighty]
        if names != self._everyone and not self._alone:
            part = torch.cat([part, torch.tensor([names], dtype=part.dtype)])
        return self._parts.offer(part)

    def _skip(self, number: int) -> list[Reply]:
        """Lets rounds be over that were not taken here, up to this one."""
        return [reply for _ in range(number - self._rounds) for reply in self._put([], Decision())]

    def forget(self, pusher: int) -> None:
        """A pusher is gone: its successor has asked none of what waits to be answered."""
        for place, (taken, decision) in enumerate(self._waiting):
            answer = tuple(other for other in decision.answer if other != pusher)
            self._waiting[place] = taken, decision._replace(answer=answer)

    def next(self) -> Agreed | None:
        """Gives the decision that is due, if all servers have said what it needs."""
        if not self._waiting:
            return None
        taken, decision = self._waiting[0]
        if taken is None:
            self._waiting.popleft()
            return Agreed([], decision, torch.zeros(0, 0))
        parts = self._parts.all()
        if parts is None:
            return None
        self._waiting.popleft()
        if self._alone:  # with gates that do not go in rounds, two gradients may be one pusher's
            return Agreed(taken, decision, parts[0])
        named = [(part, self._names(part)) for part in parts]
        common = [name for name in self._everyone if all(name in names for _, names in named)]
        distances = torch.zeros(len(common), len(common), dtype=torch.float64)
        for part, names in named:
            distances += _of(part, names, common)
        kept = [entry for entry in taken if entry.message.weight == 0 or entry.pusher in common]
        return Agreed(kept, decision, distances)

    def _names(self, part: Tensor) -> Sequence[float]:
        """Gives the pushers whose gradients a part compares."""
        rows, columns = part.shape
        if not columns:
            return []
        return self._everyone if rows == columns else part[-1].tolist()


def _of(part: Tensor, names: Sequence[float], common: Sequence[int]) -> Tensor:
    """Gives the distances between gradients that all have, out of those of one server."""
    if len(names) == len(common):
        return part[: len(names)]
    places = [names.index(name) for name in common]
    return part[places][:, places]
