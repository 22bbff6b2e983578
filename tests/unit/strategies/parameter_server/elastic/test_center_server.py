"""A center by hand-written messages, without any network."""

from itertools import permutations

import pytest
import torch

from polyrhythm.communication.message import (
    Kind,
    Message,
    RefusedMessage,
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
