"""Updates that wait until all servers have compared the same gradients, for aggregators that look at whole ones.

Every server says of every round which gradients it has, with its shard's part of their distances. What a lost worker
had pushed may be on one server and not on another: then none of them takes it, and it comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.communication.message import Message
from polyrhythm.strategies.parameter_server.rules.krum_scores import squared_distances
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.gate import Decision
from polyrhythm.strategies.parameter_server.serving.parts import Parts
from polyrhythm.strategies.parameter_server.serving.rounds import Rounds
from polyrhythm.strategies.parameter_server.serving.shard import Pushed

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
