from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.adversaries.little_is_enough import LittleIsEnough
from polyrhythm.simulation.injection.fault import Passage, parse_faults
from polyrhythm.simulation.injection.faults.byzantine import PATIENCE_S, Collusion

SERVER = 9


@dataclass
class Rank:
    rank: int


@dataclass
class Parcel:
    source: Rank
    to: Rank
    message: Message


@dataclass
class Stagehand:
    """What a collusion asks of a scene: a clock that only a test moves, and links that note what they let go."""

    now_s: float = 0.0
    actions: list[tuple[float, Any]] = field(default_factory=list)
    alive: set[int] = field(default_factory=lambda: {1, 2, 4})
    sent: list[tuple[int, Tensor | None]] = field(default_factory=list)

    @property
    def time(self) -> Stagehand:
        return self

    @property
    def links(self) -> Stagehand:
        return self

    def now(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Any) -> None:
        self.actions.append((time_s, action))

    def living(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.alive]

    def start(self, passage: Passage) -> None:
        self.sent.append((passage.parcel.source.rank, passage.parcel.message.tensor))


def begun() -> tuple[Stagehand, Collusion]:
    scene: Any = Stagehand()
    pushes = lambda passage, now_s: passage.parcel.message.kind is Kind.PUSH  # noqa: E731
    return scene, Collusion(scene, (1, 2, 4), LittleIsEnough(z=2.0), pushes)


def passage(source: int, kind: Kind, numbers: Sequence[float] | None = None) -> Passage:
    tensor = None if numbers is None else torch.tensor(numbers)
    parcel: Any = Parcel(Rank(source), Rank(SERVER), Message(kind, tensor, weight=1.0))
    return Passage(parcel)


GRADIENTS = {1: [1.0, 2.0], 2: [2.0, 2.0], 4: [6.0, -1.0]}


def less(ranks: Sequence[int]) -> Tensor:
    seen = np.array([GRADIENTS[rank] for rank in ranks])
    return torch.tensor(seen.mean(0) - 2.0 * seen.std(0), dtype=torch.float32)


@pytest.mark.parametrize("how", ["leaves", "is gone"])
def test_who_is_not_there_any_more_is_not_waited_for(how: str) -> None:
    scene, collusion = begun()
    collusion(passage(2, Kind.PUSH, GRADIENTS[2]))
    if how == "leaves":
        collusion(passage(1, Kind.LEAVE))
    else:
        scene.alive.discard(1)
    collusion(passage(4, Kind.PUSH, GRADIENTS[4]))
    assert [rank for rank, _ in scene.sent] == [2, 4]
    assert scene.sent[0][1] is not None
    torch.testing.assert_close(scene.sent[0][1], less((2, 4)))


def test_a_push_waits_for_a_minute_at_most() -> None:
    scene, collusion = begun()
    collusion(passage(2, Kind.PUSH, GRADIENTS[2]))
    [(due_s, lose_patience)] = scene.actions
    assert due_s == PATIENCE_S
    lose_patience()
    assert [rank for rank, _ in scene.sent] == [2]
    lose_patience()
    assert len(scene.sent) == 1


def test_nobody_is_an_ally_of_itself() -> None:
    with pytest.raises(RequestError, match="a rank is named twice"):
        parse_faults("byzantine(rank=1, allies=[2, 1])")
