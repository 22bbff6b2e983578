"""The keeper of one worker's parameters, message by message, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.gossip.pairing.keeper import ANSWER, Keeper, Reply
from polyrhythm.training.flat_parameters import FlatParameters
from unit.strategies.gossip.pairing.keepers import asked, keeper


def payload(reply: Reply) -> Tensor:
    assert reply[1].tensor is not None
    return reply[1].tensor


def push(keeper: Keeper, flat: FlatParameters, gradient: list[float], weight: float = 1.0) -> list[Reply]:
    flat.gradients.copy_(torch.tensor(gradient))
    message = Message(Kind.PUSH, step=3, weight=weight, learning_rate=0.5)
    return keeper.on_message(keeper.place.rank, message)


def test_who_is_asked_goes_half_the_way_and_answers_with_the_other_half() -> None:
    passive, flat = keeper(0, [2.0, 8.0])
    ((to, answer),) = passive.on_message(1, asked([6.0, 0.0], step=7))
    assert (to, answer.kind, answer.step, answer.version) == (1, Kind.DIFFERENCE, 3, 1)
    assert payload((to, answer)).tolist() == [2.0, -4.0]
    assert passive.values.tolist() == [4.0, 4.0]
    assert passive.latest == {1: 7}
    assert flat.vector.tolist() == [2.0, 8.0]  # the network goes on computing with what it has read


def test_who_asks_waits_for_the_answer_before_the_update() -> None:
    active, flat = keeper(1, [6.0, 0.0])
    ((to, question),) = active.on_message(1, Message(Kind.DIFFERENCE, step=3))
    assert to in (0, 2)
    assert payload((to, question)).tolist() == [6.0, 0.0]
    assert push(active, flat, [2.0, 2.0]) == []
    ((own, answer),) = active.on_message(to, Message(Kind.DIFFERENCE, torch.tensor([2.0, -4.0]), step=9))
    assert (own, answer.tag, answer.stop) == (1, ANSWER, False)
    assert flat.vector.tolist() == [6 - 2 - 0.5 * 2, 0 + 4 - 0.5 * 2]
    assert active.latest == {to: 9}
    assert active.staleness == {1: 1}


@pytest.mark.parametrize("late", [False, True])
def test_a_pair_keeps_its_sum_and_agrees(late: bool) -> None:
    """Two keepers and what passes between them; the answer comes before the gradient or after it."""
    (active, flat), (passive, _) = keeper(1, [6.0, 0.0], workers=2), keeper(0, [2.0, 8.0], workers=2)
    ((_, question),) = active.on_message(1, Message(Kind.DIFFERENCE, step=3))
    ((_, answer),) = passive.on_message(1, question.received())
    if late:
        assert push(active, flat, [0.0, 0.0]) == []
    active.on_message(0, answer)
    assert active.values.tolist() == passive.values.tolist() == [4.0, 4.0]


def test_averages_between_reading_and_update_make_a_gradient_stale() -> None:
    passive, flat = keeper(0, [0.0])
    push(passive, flat, [0.0])
    passive.on_message(1, asked([4.0]))
    passive.on_message(3, asked([2.0]))
    assert push(passive, flat, [1.0])[0][0] == 0
    assert flat.vector.tolist() == [2.0 - 0.5]
    assert passive.staleness == {0: 1, 2: 1}
    passive.on_message(1, asked([3.5]))
    passive.on_message(0, Message(Kind.PULL))  # it was away, and takes the newest
    assert flat.vector.tolist() == [2.5]
    push(passive, flat, [0.0])
    assert passive.staleness == {0: 2, 2: 1}


def test_a_gradient_without_weight_changes_nothing() -> None:
    passive, flat = keeper(0, [1.0])
    assert push(passive, flat, [8.0], weight=0.0)[0][1].tag == ANSWER
    assert flat.vector.tolist() == [1.0]
    assert passive.staleness == {}


def test_a_lost_partner_is_not_waited_for_and_not_asked_again() -> None:
    active, flat = keeper(1, [1.0])
    ((first, _),) = active.on_message(1, Message(Kind.DIFFERENCE, step=3))
    assert push(active, flat, [1.0]) == []
    ((own, _),) = active.on_loss(first)
    assert own == 1
    assert flat.vector.tolist() == [0.5]
    assert active.staleness == {0: 1}
    (other,) = {0, 2} - {first}
    for step in range(4, 12):
        ((to, _),) = active.on_message(1, Message(Kind.DIFFERENCE, step=step))
        assert to == other
        active.on_message(other, Message(Kind.DIFFERENCE, torch.zeros(1)))
    assert active.on_loss(other) == []
    assert active.on_message(1, Message(Kind.DIFFERENCE, step=12)) == []  # nobody is left
    assert push(active, flat, [1.0])


def test_who_is_not_ready_has_nothing_to_give() -> None:
    passive, _ = keeper(0, [1.0])
    passive.ready = False
    ((to, answer),) = passive.on_message(1, asked([5.0]))
    assert (to, answer.kind, answer.tensor) == (1, Kind.DIFFERENCE, None)
    assert passive.values.tolist() == [1.0]
    assert passive.copy() is None
    active, flat = keeper(1, [5.0])
    active.on_message(1, Message(Kind.DIFFERENCE, step=3))
    push(active, flat, [0.0])
    (partner,) = active.place.partners[:1]
    active._asked = partner
    assert active.on_message(partner, answer)
    assert flat.vector.tolist() == [5.0]
