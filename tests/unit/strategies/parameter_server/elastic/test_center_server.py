"""A center by hand-written messages, without any network."""

from itertools import permutations

import pytest
import torch

from polyrhythm.communication.message import (
    Kind,
    Message,
    RefusedMessage,
    pack_tensors,
    unpack_tensors,
)
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.elastic.averaging import ElasticRule, center_session

WORKERS = (0, 2, 5)  # ranks
START = torch.tensor([1.0, -2.0, 4.0])
HALF = ElasticRule(alpha=0.5, tau=1, together=False)
QUARTER_TOGETHER = ElasticRule(alpha=0.25, tau=1, together=True)


def center(rule, workers=WORKERS):
    made = center_session(workers, rule)
    assert made.on_message(0, Message(Kind.PARAMETERS, START.clone())) == []
    return made


def offer(values, step=0, stop=False):
    return Message(Kind.VECTOR, torch.tensor(values), step=step, stop=stop)


def pulled(made, rank=0):
    [(to, reply)] = made.on_message(rank, Message(Kind.PULL))
    assert to == rank
    return reply


def test_alone_both_sides_move_by_the_same_difference():
    made = center(HALF)
    [(to, reply)] = made.on_message(2, offer([3.0, 2.0, 0.0], step=8))
    assert (to, reply.kind, reply.version, reply.step) == (2, Kind.DIFFERENCE, 1, 8)
    assert reply.tensor.tolist() == [1.0, 2.0, -2.0]
    assert pulled(made).tensor.tolist() == [2.0, 0.0, 2.0]
    assert made.steps == {0: 0, 2: 8, 5: 0}


def test_staleness_is_how_long_a_worker_has_not_heard_of_the_center():
    made = center(HALF)
    for rank in (0, 2):
        pulled(made, rank)
    heard = [(0, 0, {}), (2, 4, {1: 4}), (2, 8, {0: 4, 1: 4}), (0, 4, {0: 4, 1: 4, 2: 4})]  # rank, steps
    for rank, steps, counted in heard:
        made.on_message(rank, offer([0.0, 0.0, 0.0], step=steps))
        assert made.staleness == counted
    made.on_loss(2)
    pulled(made, 2)  # a successor
    made.on_message(2, offer([0.0, 0.0, 0.0], step=9))
    assert made.staleness == {0: 5, 1: 4, 2: 4}
    assert made.steps == {0: 4, 2: 9, 5: 0}


def test_who_leaves_pulls_at_the_center_for_a_last_time():
    made = center(HALF)
    assert made.on_message(2, Message(Kind.LEAVE, torch.tensor([3.0, 2.0, 0.0]), step=6)) == []
    assert pulled(made).tensor.tolist() == [2.0, 0.0, 2.0]
    assert (made.steps[2], made.staleness) == (6, {0: 6})
    together = center(QUARTER_TOGETHER)
    for rank in (5, 0):
        together.on_message(rank, Message(Kind.LEAVE, torch.tensor([5.0, 2.0, 0.0]), step=6))
        assert torch.equal(together.values, START)
    together.on_message(2, Message(Kind.LEAVE, torch.tensor([1.0, -2.0, 4.0]), step=6))
    assert together.values.tolist() == [3.0, 0.0, 2.0]


def test_alpha_of_one_swaps_worker_and_center():
    made = center(ElasticRule(alpha=1.0, tau=1, together=False))
    own = torch.tensor([7.0, 8.0, 9.0])
    [(_, reply)] = made.on_message(5, offer(own.tolist()))
    assert torch.equal(own - reply.tensor, START)
    assert torch.equal(pulled(made).tensor, own)


def test_alpha_of_zero_moves_nothing():
    made = center(ElasticRule(alpha=0.0, tau=1, together=False))
    [(_, reply)] = made.on_message(5, offer([7.0, 8.0, 9.0]))
    assert reply.tensor.tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(pulled(made).tensor, START)


@pytest.mark.parametrize("rule", [HALF, QUARTER_TOGETHER])
def test_where_all_are_equal_nothing_moves(rule):
    made = center(rule)
    for rank in WORKERS:
        for _, reply in made.on_message(rank, offer(START.tolist())):
            assert not reply.tensor.any()
    assert torch.equal(pulled(made).tensor, START)


@pytest.mark.parametrize("order", list(permutations(WORKERS)))
def test_together_all_differences_are_made_with_the_old_center(order):
    made = center(QUARTER_TOGETHER)
    own = {0: [5.0, 2.0, 4.0], 2: [1.0, -6.0, 8.0], 5: [-3.0, 2.0, 0.0]}
    replies = []
    for position, rank in enumerate(order):
        replies = made.on_message(rank, offer(own[rank]))
        assert bool(replies) == (position == 2)
    given = {to: reply.tensor for to, reply in replies}
    for rank, vector in own.items():
        assert torch.equal(given[rank], 0.25 * (torch.tensor(vector) - START))
    # beta = 3/4: a quarter of the old center, three quarters of the mean
    mean = sum(torch.tensor(vector) for vector in own.values()) / 3
    now = pulled(made).tensor
    torch.testing.assert_close(now, 0.25 * START + 0.75 * mean, rtol=0, atol=1e-6)
    before = sum(torch.tensor(vector) for vector in own.values()) + START
    after = sum(torch.tensor(vector) - given[rank] for rank, vector in own.items()) + now
    assert torch.equal(before, after)  # all of these are dyadic
    assert made.version == 1


def test_together_the_order_of_arrival_does_not_change_a_bit():
    generator = torch.Generator().manual_seed(1)
    own = {rank: torch.randn(3, generator=generator) for rank in WORKERS}
    found = []
    for order in permutations(WORKERS):
        made = center(ElasticRule(alpha=0.3, tau=1, together=True))
        for rank in order:
            made.on_message(rank, Message(Kind.VECTOR, own[rank].clone()))
        found.append(made.values.clone())
    assert all(torch.equal(found[0], other) for other in found)


def test_a_wish_to_stop_reaches_all_of_the_same_exchange():
    made = center(QUARTER_TOGETHER)
    made.on_message(0, offer([0.0, 0.0, 0.0]))
    made.on_message(2, offer([0.0, 0.0, 0.0], stop=True))
    assert [reply.stop for _, reply in made.on_message(5, offer([0.0, 0.0, 0.0]))] == [True] * 3


def test_a_lost_worker_is_forgotten_and_its_successor_begins_with_the_steps_that_are_left():
    made = center(HALF)
    made.on_message(5, offer([3.0, 2.0, 0.0], step=12))
    assert made.on_loss(5) == []
    answer = pulled(made, 5)
    assert (answer.step, answer.tensor.tolist()) == (12, [2.0, 0.0, 2.0])
    assert made.on_loss(7) == []  # none of ours


def test_what_was_answered_does_not_change_with_the_center():
    made = center(HALF)
    before = pulled(made).tensor
    made.on_message(2, offer([9.0, 9.0, 9.0]))
    assert torch.equal(before, START)


def test_the_final_center_waits_for_all_and_the_second_leave_ends_it():
    made = center(HALF)
    made.on_message(0, Message(Kind.LEAVE))
    assert made.on_message(0, Message(Kind.PULL, stop=True)) == []
    made.on_message(2, Message(Kind.LEAVE))
    assert made.on_message(2, Message(Kind.PULL))[0][1].kind is Kind.LEAVE  # a late successor
    [(to, reply)] = made.on_message(5, Message(Kind.LEAVE))
    assert (to, reply.kind) == (0, Kind.PARAMETERS)
    assert not made.done
    made.on_message(0, Message(Kind.LEAVE))
    assert made.done


def test_who_asks_before_there_is_a_center_is_answered_when_there_is():
    made = center_session(WORKERS, HALF)
    assert made.on_message(2, Message(Kind.PULL)) == []
    [(to, reply)] = made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
    assert to == 2
    assert torch.equal(reply.tensor, START)


def test_state_survives_the_wire_and_goes_before_what_worker_0_sends():
    made = center(HALF)
    made.on_message(2, offer([3.0, 2.0, 0.0], step=4))
    copy = center_session(WORKERS, HALF)
    copy.load_state(unpack_tensors(pack_tensors(*made.state())))
    copy.on_message(0, Message(Kind.PARAMETERS, torch.zeros(3)))
    assert torch.equal(copy.values, made.values)
    assert (copy.version, copy.steps, copy.staleness) == (1, made.steps, {0: 4})


def test_what_no_worker_sends_is_named():
    made = center(HALF)
    with pytest.raises(RunError, match="received VECTOR from rank 1, which pushes nothing here"):
        made.on_message(1, offer([0.0, 0.0, 0.0]))
    with pytest.raises(RunError, match="cannot do anything with PUSH from rank 2"):
        made.on_message(2, Message(Kind.PUSH, torch.zeros(3)))
    with pytest.raises(RunError, match="a VECTOR arrived without its tensor"):
        made.on_message(2, Message(Kind.VECTOR))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (offer([0.0, 0.0]), "payload"),
        (offer([0, 0, 0]), "payload"),
        (offer([0.0, 0.0, 0.0], step=-1), "step"),
        (offer([0.0, 0.0, 0.0])._replace(version=1), "numbers"),
        (offer([0.0, 0.0, 0.0])._replace(weight=2.0), "numbers"),
        (Message(Kind.PARAMETERS, torch.zeros(3)), "sender"),
        (Message(Kind.PULL, stop=True), "sender"),
        (Message(Kind.PULL, torch.zeros(3)), "payload"),
        (Message(Kind.LEAVE, torch.zeros(2)), "payload"),
        (Message(Kind.LEAVE, version=1), "numbers"),
    ],
)
def test_what_no_worker_of_ours_sends_leaves_the_center_where_it_is(message, reason):
    made = center(HALF)
    with pytest.raises(RefusedMessage) as refused:
        made.on_message(2, message)
    assert refused.value.reason == reason
    assert pulled(made).tensor.tolist() == START.tolist()
    assert made.steps == {0: 0, 2: 0, 5: 0}


def test_the_center_is_given_once_and_first():
    with pytest.raises(RefusedMessage) as early:
        center_session(WORKERS, HALF).on_message(2, offer([0.0, 0.0, 0.0]))
    with pytest.raises(RefusedMessage) as again:
        center(HALF).on_message(0, Message(Kind.PARAMETERS, torch.zeros(3)))
    made = center(QUARTER_TOGETHER)
    made.on_message(2, offer([0.0, 0.0, 0.0]))
    with pytest.raises(RefusedMessage) as twice:
        made.on_message(2, offer([0.0, 0.0, 0.0]))
    assert [each.value.reason for each in (early, again, twice)] == ["order"] * 3


def test_together_a_successor_takes_the_place_of_one_that_left_before_the_others_came():
    made = center(QUARTER_TOGETHER, workers=(0, 2))
    assert made.on_message(0, Message(Kind.LEAVE, torch.full((3,), 100.0), step=4)) == []
    made.on_loss(0)
    ((_, invited),) = made.on_message(0, Message(Kind.PULL))
    ((to, answer),) = made.on_message(0, Message(Kind.JOIN, step=invited.step))
    assert (to, answer.kind, answer.step) == (0, Kind.PARAMETERS, 0)
    assert made.on_message(0, offer([1.0, -2.0, 8.0])) == []
    replies = made.on_message(2, offer([1.0, -2.0, 0.0]))
    assert [(to, reply.tensor.tolist()) for to, reply in replies] == [
        (0, [0.0, 0.0, 1.0]),
        (2, [0.0, 0.0, -1.0]),
    ]
    assert made.steps == {0: 0, 2: 0}
    assert pulled(made).tensor.tolist() == START.tolist()
