"""What the declaration of a state promises to the author of a strategy."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.strategies.state import (
    JOINING,
    MEAN,
    OWN,
    UNCHANGED,
    Part,
    State,
    StateField,
    Stateful,
    reset,
)
from polyrhythm.strategies.worker_part import WORKER, Logged, WorkerPart


class Inner(Stateful):
    fields = StateField("buffer", Tensor), StateField("count", int)

    def __init__(self) -> None:
        self._buffer, self._count = torch.zeros(2), 0


class Outer(Stateful):
    fields = (
        StateField("vector", Tensor, MEAN, at="holder.vector"),
        StateField("maybe", Tensor, absent=None),
        StateField("messages", dict[int, Tensor]),
        StateField("inner", Part),
        StateField("none", Part),
        StateField("clocks", list[int], reset(lambda start: start.step, "pusher")),
        StateField("stretches", dict[int, list[list[int]]], absent={}),
        StateField("newer", float, absent=UNCHANGED),
        StateField("rank", int, OWN, at="rank", loads=False),
        StateField("", Part, at="root"),
    )

    def __init__(self, rank: int) -> None:
        self.rank, self.holder, self.root = rank, Holder(), Inner()
        self._maybe: Tensor | None = None
        self._messages: dict[int, Tensor] = {}
        self._inner, self._none = Inner(), None
        self._clocks = [0, 0]
        self._stretches: dict[int, list[list[int]]] = {}
        self._newer = 0.5


class Holder:
    def __init__(self) -> None:
        self.vector = torch.zeros(3)


def changed() -> Outer:
    made = Outer(1)
    made.holder.vector += 7
    made._messages[4] = torch.ones(3)
    made._inner._buffer += 2
    made._inner._count = 3
    made.root._buffer += 5
    made._clocks, made._stretches = [4, 6], {1: [[2, 3]]}
    made._maybe, made._newer = torch.ones(1), 0.25
    return made


def sent(state: State) -> State:
    """Return a state as another process gets it."""
    return {name: value.clone() for name, value in state[0].items()}, json.loads(json.dumps(state[1]))


def test_what_was_saved_is_restored_in_place() -> None:
    first, second = changed(), Outer(2)
    vector = second.holder.vector
    second.load_state(sent(first.state()))
    assert second.holder.vector is vector
    assert second.rank == 2
    again, (tensors, facts) = second.state(), first.state()
    assert again[1] == facts | {"rank": 2}
    assert (
        set(again[0])
        == set(tensors)
        == {
            "vector",
            "maybe",
            "messages.4",
            "inner.buffer",
            "buffer",
        }
    )
    assert all(torch.equal(value, tensors[name]) for name, value in again[0].items())


def test_a_state_of_an_older_version_may_lack_what_says_so() -> None:
    tensors, facts = sent(changed().state())
    del tensors["maybe"], facts["stretches"], facts["newer"]
    made = changed()
    made.load_state((tensors, facts))
    assert (made._maybe, made._stretches, made._newer) == (None, {}, 0.25)
    made._stretches[0] = []
    other = changed()
    other.load_state((tensors, facts))
    assert other._stretches == {}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("clocks", "x", "'x' is no"),
        ("clocks", [1.5], "1.5 is no int"),
        ("newer", True, "True is no float"),
        ("vector", torch.zeros(1), r"vector has the shape \(1,\), not \(3,\)"),
        ("inner.buffer", torch.zeros(2, 2), "buffer has the shape"),
        ("vector", None, "it lacks vector"),
        ("clocks", None, "it lacks clocks"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Any, said: str) -> None:
    tensors, facts = sent(changed().state())
    where: dict[str, Any] = tensors if name in tensors else facts
    where.pop(name)
    if value is not None:
        where[name] = value
    with pytest.raises(ValueError, match=said):
        Outer(0).load_state((tensors, facts))


def test_a_field_without_its_attribute_is_named() -> None:
    class Wrong(Stateful):
        fields = (StateField("momentum", Tensor),)

    with pytest.raises(
        RequestError, match=r"Wrong declares the field 'momentum' of its state, but .*'_momentum'"
    ):
        Wrong().state()


class Rounds(Logged):
    fields = (
        StateField("inner", Part, under=""),
        StateField("own", int, OWN),
        StateField("heard", bool, JOINING),
    )

    def __init__(self, count: int = 0, *, heard: bool = False) -> None:
        super().__init__()
        self._inner, self._own, self._heard = Inner(), count, heard
        self._inner._count = count


def test_a_joining_worker_copies_more_than_a_checkpoint_has_and_nothing_of_its_own() -> None:
    first, second, third = Rounds(3, heard=True), Rounds(4), Rounds(5)
    first._inner._buffer += 2
    tensors, facts = sent(first.state())
    assert (list(tensors), facts) == (["buffer"], {"inner": {"count": 3}, "own": 3})
    second.load_state((tensors, facts))
    assert (second._inner._count, second._own, second._heard, second.restored) == (3, 3, False, True)
    third.enter(sent(first.to_enter_with()), 7)
    assert (third._inner._count, third._own, third._heard, third.restored) == (3, 5, True, False)
    assert third._inner._buffer.tolist() == second._inner._buffer.tolist() == [2, 2]


class Apart(WorkerPart):
    fields = WORKER, StateField("sum", int, OWN)

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._sum = rank, 10 + rank


@pytest.mark.parametrize("rank", [1, 2])
def test_a_worker_without_common_state_continues_from_its_own_only(rank: int) -> None:
    part = Apart(rank)
    part.load_state(sent(Apart(1).state()))
    assert (part._sum, part.restored) == ((11, True) if rank == 1 else (12, False))
