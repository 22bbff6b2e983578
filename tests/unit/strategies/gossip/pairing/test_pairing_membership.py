"""How workers begin together, come back, and end together, message by message."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import Keeper
from polyrhythm.strategies.gossip.pairing.membership import Host, Member
from polyrhythm.training.flat_parameters import FlatParameters
from unit.strategies.gossip.pairing.keepers import asked, keeper


def host(workers: int = 3) -> tuple[Host, Keeper, FlatParameters]:
    made, flat = keeper(0, [4.0], workers)
    made.ready = False
    return Host(made, flat), made, flat


def begun(workers: int = 3) -> tuple[Host, Keeper, FlatParameters]:
    """Gives a host whose workers have all begun."""
    made = host(workers)
    for rank in range(workers):
        made[0].on_message(rank, Message(Kind.JOIN))
    return made


def kinds(replies: list[tuple[int, Message]]) -> dict[int, Kind]:
    return {to: message.kind for to, message in replies}


def test_all_begin_together_with_worker_0s_parameters() -> None:
    membership, held, _ = host()
    assert membership.on_message(2, Message(Kind.JOIN, step=5)) == []
    assert membership.on_message(0, Message(Kind.JOIN, step=5)) == []
    assert not held.ready
    replies = membership.on_message(1, Message(Kind.JOIN, step=5))
    assert kinds(replies) == dict.fromkeys(range(3), Kind.PARAMETERS)
    assert all(message.step == 5 and not message.version for _, message in replies)
    assert [message.tensor.tolist() for to, message in replies if to and message.tensor is not None] == [
        [4.0]
    ] * 2
    assert held.ready


def test_whoever_is_lost_at_the_start_is_not_waited_for() -> None:
    membership, _, _ = host()
    membership.on_message(0, Message(Kind.JOIN))
    membership.on_message(1, Message(Kind.JOIN))
    assert kinds(membership.on_loss(2)) == dict.fromkeys((0, 1), Kind.PARAMETERS)
    # nobody has heard of it, so its successor is no successor
    ((to, message),) = membership.on_message(2, Message(Kind.JOIN))
    assert (to, message.kind, message.version) == (2, Kind.PARAMETERS, 0)


def test_a_successor_is_told_that_it_is_one_and_the_step_that_was_heard() -> None:
    membership, held, _ = begun()
    held.on_message(1, asked([8.0], step=11))
    membership.on_loss(1)
    ((to, message),) = membership.on_message(1, Message(Kind.JOIN))
    assert (to, message.step, message.version) == (1, 11, 1)
    assert message.tensor is not None
    assert message.tensor.tolist() == [6.0]


def test_models_are_collected_once_all_have_taken_their_last_step() -> None:
    membership, _, flat = begun()
    assert membership.on_message(1, Message(Kind.LEAVE)) == []
    assert membership.on_message(0, Message(Kind.LEAVE)) == []
    assert kinds(membership.on_message(2, Message(Kind.LEAVE))) == dict.fromkeys((1, 2), Kind.LEAVE)
    assert membership.on_message(2, Message(Kind.PARAMETERS, torch.tensor([1.0]))) == []
    assert kinds(membership.on_message(3, Message(Kind.JOIN))) == {3: Kind.LEAVE}  # too late
    assert kinds(membership.on_message(1, Message(Kind.PARAMETERS, torch.tensor([7.0])))) == {
        0: Kind.PARAMETERS
    }
    assert flat.vector.tolist() == [(4.0 + 1.0 + 7.0) / 3]
    assert not membership.over
    membership.on_message(0, Message(Kind.LEAVE))  # its own worker, last of all
    assert membership.over


@pytest.mark.parametrize("lost_when", ["training", "asked for its model", "gone with it"])
def test_the_lost_are_not_waited_for_at_the_end(lost_when: str) -> None:
    membership, _, flat = begun()
    if lost_when == "training":
        membership.on_loss(2)
    else:
        membership.on_message(2, Message(Kind.LEAVE))
    membership.on_message(0, Message(Kind.LEAVE))
    assert kinds(membership.on_message(1, Message(Kind.LEAVE)))[1] is Kind.LEAVE
    if lost_when == "gone with it":
        membership.on_message(2, Message(Kind.PARAMETERS, torch.tensor([100.0])))
    membership.on_loss(2)
    assert kinds(membership.on_message(1, Message(Kind.PARAMETERS, torch.tensor([8.0])))) == {
        0: Kind.PARAMETERS
    }
    assert flat.vector.item() == pytest.approx((4 + 8 + 100) / 3 if lost_when == "gone with it" else 6)


def test_a_wish_to_stop_is_passed_on_once() -> None:
    membership, held, _ = begun()
    replies = membership.on_message(2, Message(Kind.EVENT, stop=True))
    assert kinds(replies) == dict.fromkeys((1, 2), Kind.EVENT)
    assert all(message.stop for _, message in replies)
    assert held.stop
    assert held.answer()[1].stop
    assert membership.on_message(1, Message(Kind.EVENT, stop=True)) == []


def member(worker: int = 1, *, resumed: bool = False) -> tuple[Member, Keeper, FlatParameters]:
    made, flat = keeper(worker, [1.0])
    made.ready = False
    return Member(made, flat, resumed=resumed), made, flat


@pytest.mark.parametrize("resumed", [False, True])
def test_a_member_begins_with_worker_0s_parameters_or_its_own(resumed: bool) -> None:
    membership, held, flat = member(resumed=resumed)
    join = Message(Kind.JOIN, step=5)
    assert membership.on_message(1, join) == [(0, join)]
    ((own, answer),) = membership.on_message(0, Message(Kind.PARAMETERS, torch.tensor([9.0]), step=5))
    assert (own, answer.step) == (1, 5)
    assert flat.vector.tolist() == held.values.tolist() == ([1.0] if resumed else [9.0])
    assert held.ready


def test_a_successor_begins_with_the_mean_of_its_partners_at_the_last_step_that_one_heard() -> None:
    membership, held, flat = member(3)  # of a ring of four: partners 0 and 2
    membership.on_message(3, Message(Kind.JOIN))
    ((to, message),) = membership.on_message(
        0, Message(Kind.PARAMETERS, torch.tensor([9.0]), step=4, version=1)
    )
    assert (to, message.kind) == (2, Kind.JOIN)
    assert not held.ready
    ((own, answer),) = membership.on_message(2, Message(Kind.PARAMETERS, torch.tensor([5.0]), step=6))
    assert (own, answer.step) == (3, 6)
    assert flat.vector.tolist() == [7.0]


def test_a_successor_does_without_partners_that_are_lost_or_not_ready() -> None:
    membership, _, flat = member(1)
    membership.on_message(1, Message(Kind.JOIN))
    membership.on_message(0, Message(Kind.PARAMETERS, torch.tensor([9.0]), step=4, version=1))
    ((own, answer),) = membership.on_loss(2)
    assert (own, answer.step) == (1, 4)
    assert flat.vector.tolist() == [9.0]
    membership, _, flat = member(1)
    membership.on_message(1, Message(Kind.JOIN))
    membership.on_message(0, Message(Kind.PARAMETERS, torch.tensor([9.0]), step=4, version=1))
    membership.on_message(2, Message(Kind.PARAMETERS, step=8))
    assert flat.vector.tolist() == [9.0]


def test_a_partner_welcomes_a_successor() -> None:
    membership, held, _ = member(2)
    held.make_ready(0)
    held.on_message(1, asked([3.0], step=6))
    held.on_loss(1)
    assert held.absent == {1}
    ((to, message),) = membership.on_message(1, Message(Kind.JOIN))
    assert (to, message.kind, message.step) == (1, Kind.PARAMETERS, 6)
    assert message.tensor is not None
    assert message.tensor.tolist() == [2.0]
    assert held.absent == set()


def test_a_member_gives_its_model_and_leaves() -> None:
    membership, held, _ = member()
    held.make_ready(0)
    ((to, message),) = membership.on_message(1, Message(Kind.LEAVE))
    assert (to, message.kind) == (0, Kind.LEAVE)
    (first, own) = membership.on_message(0, Message(Kind.LEAVE))
    assert (first[0], first[1].kind) == (0, Kind.PARAMETERS)
    assert own[0] == 1
    assert membership.over


def test_who_comes_too_late_is_told_to_leave() -> None:
    membership, _, _ = member()
    ((own, answer),) = membership.on_message(0, Message(Kind.LEAVE))
    assert (own, answer.kind) == (1, Kind.LEAVE)
    assert membership.over


def test_nobody_does_without_worker_0() -> None:
    membership, _, _ = member()
    with pytest.raises(PeerLost) as caught:
        membership.on_loss(0)
    assert caught.value.rank == 0
