"""Worker 0's successor and the others, message by message."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import Keeper
from polyrhythm.strategies.gossip.pairing.membership import KeeperSuccessor, Member, Standing
from polyrhythm.training.flat_parameters import FlatParameters
from unit.strategies.gossip.pairing.keepers import asked, keeper

Observer = list[tuple[int, Message]]


def told(replies: Observer) -> list[tuple[int, Kind]]:
    return [(to, message.kind) for to, message in replies]


def parameters(value: float, step: int = 0) -> Message:
    return Message(Kind.PARAMETERS, torch.tensor([value]), step=step)


def here(standing: Standing, step: int = 0, *, stop: bool = False) -> Message:
    return Message(Kind.LEAD, version=standing, step=step, stop=stop)


def called() -> tuple[KeeperSuccessor, Keeper, FlatParameters]:
    """Gives the successor of worker 0 of four in a ring, which has asked all; its partners are 1 and 3."""
    made, flat = keeper(0, [4.0], 4)
    made.ready = False
    membership = KeeperSuccessor(made, flat)
    assert told(membership.on_message(0, Message(Kind.JOIN))) == [(rank, Kind.LEAD) for rank in (1, 2, 3)]
    return membership, made, flat


def test_it_begins_with_the_mean_of_its_partners_at_the_step_that_anybody_last_heard_of() -> None:
    membership, held, flat = called()
    assert membership.on_message(1, here(Standing.INSIDE, 3)) == []
    assert membership.on_message(3, here(Standing.INSIDE, 5)) == []
    assert told(membership.on_message(2, here(Standing.INSIDE, 8))) == [(1, Kind.JOIN), (3, Kind.JOIN)]
    assert membership.on_message(1, parameters(2.0)) == []
    ((own, answer),) = membership.on_message(3, parameters(6.0))
    assert (own, answer.kind, answer.step) == (0, Kind.PARAMETERS, 8)
    assert flat.vector.tolist() == held.values.tolist() == [4.0]
    assert held.ready


def test_who_wanted_in_or_out_or_to_stop_meanwhile_has_waited() -> None:
    membership, held, _ = called()
    membership.on_message(1, here(Standing.INSIDE, 3))
    membership.on_message(1, Message(Kind.LEAVE))
    membership.on_message(2, here(Standing.OUTSIDE))
    membership.on_message(2, Message(Kind.JOIN))
    membership.on_message(3, here(Standing.INSIDE, 2, stop=True))
    membership.on_loss(3)
    replies = membership.on_message(1, parameters(2.0))
    assert told(replies) == [(0, Kind.PARAMETERS), (1, Kind.EVENT), (2, Kind.PARAMETERS)]
    assert replies[-1][1].version == 1  # of its predecessor partners may know more
    assert held.stop
    assert membership.on_message(0, Message(Kind.LEAVE)) == []
    assert told(membership.on_message(2, Message(Kind.LEAVE))) == [(1, Kind.LEAVE), (2, Kind.LEAVE)]


def test_where_its_partners_have_nothing_it_asks_others_and_who_is_lost_is_not_waited_for() -> None:
    membership, _, flat = called()
    membership.on_loss(1)
    membership.on_message(2, here(Standing.INSIDE, 4))
    assert told(membership.on_message(3, here(Standing.ENTERING))) == [(2, Kind.JOIN)]
    ((_, answer),) = membership.on_message(2, parameters(7.0))
    assert (answer.step, flat.vector.tolist()) == (4, [7.0])


def test_before_anyone_has_parameters_all_begin_anew_with_its_own() -> None:
    membership, held, flat = called()
    for rank in (1, 2):
        membership.on_message(rank, here(Standing.WAITING))
        membership.on_message(rank, Message(Kind.JOIN))
    replies = membership.on_loss(3)
    assert told(replies) == [(rank, Kind.PARAMETERS) for rank in (0, 1, 2)]
    assert flat.vector.tolist() == held.values.tolist() == [4.0]


@pytest.mark.parametrize("standings", [(), (Standing.ENTERING, Standing.OUTSIDE)])
def test_where_nobody_has_parameters_any_more_the_run_ends_with_a_line(
    standings: tuple[Standing, ...],
) -> None:
    membership, _, _ = called()
    for rank, standing in enumerate(standings, start=1):
        membership.on_message(rank, here(standing))
    for rank in range(1 + len(standings), 3):
        membership.on_loss(rank)
    with pytest.raises(
        PeerLost, match=r"rank 0 is gone \(noticed while looking for a worker with parameters\)"
    ):
        membership.on_loss(3)


def member(**options: bool) -> tuple[Member, Keeper]:
    """Gives worker 1 of four in a ring."""
    made, flat = keeper(1, [1.0], 4)
    made.ready = False
    return Member(made, flat, host_returns=True, **options), made


def test_a_member_says_again_what_the_lost_one_may_not_have_heard_and_is_answered_once() -> None:
    membership, held = member()
    join = Message(Kind.JOIN, step=5)
    assert membership.on_message(1, join) == [(0, join)]
    assert told(membership.on_loss(0)) == [(1, Kind.LEAD)]  # its own worker waits, and is told
    assert membership.on_message(1, join) == []
    (_, first), (_, second) = membership.on_message(0, Message(Kind.LEAD))
    assert (first.kind, first.version, second) == (Kind.LEAD, Standing.WAITING, join)
    assert told(membership.on_message(0, parameters(9.0, step=3))) == [(1, Kind.PARAMETERS)]
    assert (held.step, held.latest[0]) == (5, 3)
    assert membership.on_message(0, parameters(100.0)) == []
    assert held.values.tolist() == [9.0]


@pytest.mark.parametrize(
    ("options", "standing"),
    [({}, Standing.WAITING), ({"resumed": True}, Standing.RESUMED), ({"succeeds": True}, Standing.ENTERING)],
)
def test_how_a_member_stands(options: dict[str, bool], standing: Standing) -> None:
    membership, held = member(**options)
    assert membership.on_message(0, Message(Kind.LEAD))[0][1].version == Standing.OUTSIDE
    membership.on_message(1, Message(Kind.JOIN))
    assert membership.on_message(0, Message(Kind.LEAD))[0][1].version == standing
    ((_, given),) = membership.on_message(0, Message(Kind.JOIN))
    assert (given.tensor is None) == (standing is not Standing.RESUMED)
    held.make_ready(0)
    assert membership.on_message(0, Message(Kind.LEAD))[0][1].version == Standing.INSIDE


def test_a_member_that_is_away_from_worker_0_when_it_leaves_is_told_so_and_leaves_with_the_next() -> None:
    membership, held = member()
    held.make_ready(0)
    held.on_message(0, asked([3.0], step=6))
    assert membership.on_loss(0) == []  # its worker computes, and hears of it elsewhere
    assert told(membership.on_message(1, Message(Kind.LEAVE))) == [(1, Kind.LEAD)]
    assert membership.on_message(1, Message(Kind.LEAVE)) == []  # once for each loss
    (_, word), leave = membership.on_message(0, Message(Kind.LEAD))
    assert (word.version, word.step, told([leave])) == (Standing.INSIDE, 6, [(0, Kind.LEAVE)])


def test_a_member_gives_its_model_to_every_worker_0_until_its_own_worker_ends() -> None:
    membership, held = member()
    held.make_ready(0)
    membership.on_message(1, Message(Kind.LEAVE))
    assert told(membership.on_message(0, Message(Kind.LEAVE))) == [(0, Kind.PARAMETERS), (1, Kind.PARAMETERS)]
    assert membership.over
    membership.stay()
    membership.on_loss(0)
    assert told(membership.on_message(0, Message(Kind.LEAD)))[-1] == (0, Kind.LEAVE)
    assert told(membership.on_message(0, Message(Kind.LEAVE))) == [(0, Kind.PARAMETERS)]
    assert not membership.over
    assert membership.on_message(1, Message(Kind.LEAVE)) == []
    assert membership.over


def test_where_worker_0_has_no_successor_its_loss_is_raised() -> None:
    made, flat = keeper(1, [1.0], 4)
    with pytest.raises(PeerLost):
        Member(made, flat).on_loss(0)
