"""How workers begin together, come back, and end together, message by message."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, place_of
from polyrhythm.strategies.gossip.pairing.membership import Host, Member
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.training.flat_parameters import FlatParameters
from unit.strategies.gossip.pairing.keepers import keeper, setting_of


def host(workers: int = 3) -> tuple[Host, Keeper, FlatParameters]:
    made, flat = keeper(0, [4.0], workers)
    made.ready = False
    return Host(made, flat), made, flat


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


def member(worker: int = 1, *, resumed: bool = False) -> tuple[Member, Keeper, FlatParameters]:
    setting = setting_of(worker, [1.0])
    made = Keeper(place_of(Ring(), range(4), worker), setting)
    return Member(made, setting, restored=resumed), made, setting.flat


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
