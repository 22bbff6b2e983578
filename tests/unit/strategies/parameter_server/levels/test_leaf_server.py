"""A leaf by hand-written messages, without any network: workers 0, 1, 2 of 0 … 4; leaves 5, 6; roots 7, 8."""

import math

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.hierarchical import LeafSession, Levels
from polyrhythm.strategies.role_assignment import RoleAssignment

CAST = RoleAssignment((0, 1, 2, 3, 4), (5, 6, 7, 8))


def leaf(index=0, groups=2):
    return LeafSession(Levels.of(CAST, groups), index)


def begun(index=0):
    """A leaf whose workers have the parameters to begin with."""
    made = leaf(index)
    for worker in Levels.of(CAST, 2).groups[index]:
        made.on_message(worker, Message(Kind.PULL))
    made.on_message(7, from_root([0.0], version=0, step=0, kind=Kind.PARAMETERS))
    made.on_message(8, from_root([0.0, 0.0], version=0, step=0, kind=Kind.PARAMETERS))
    return made


def push(values, step=0, weight=1.0, stop=False):
    return Message(Kind.PUSH, torch.tensor(values), step=step, weight=weight, learning_rate=0.5, stop=stop)


def from_root(values, version=1, step=1, stop=False, kind=Kind.VECTOR):
    return Message(kind, torch.tensor(values), version=version, step=step, stop=stop)


def shown(replies):
    return [
        (to, reply.kind, reply.tensor.tolist() if reply.tensor is not None else None) for to, reply in replies
    ]


def test_neighbors_share_a_leaf_and_some_leaves_may_have_nobody():
    levels = Levels.of(CAST, 2)
    assert levels == Levels((5, 6), (7, 8), ((0, 1), (2, 3, 4)))
    assert [levels.leaf_of(worker) for worker in CAST.workers] == [5, 5, 6, 6, 6]
    few = Levels.of(RoleAssignment((0,), (1, 2, 3)), 2)
    assert few == Levels((1, 2), (3,), ((0,), ()))
    assert few.busy_leaves == (1,)


def test_who_is_not_of_the_group_is_named():
    with pytest.raises(RunError, match="a leaf received PUSH from rank 3, which is not of its group"):
        leaf(0).on_message(3, push([1.0]))
    with pytest.raises(RunError, match="cannot do anything with VECTOR from rank 1"):
        leaf(0).on_message(1, Message(Kind.VECTOR, torch.zeros(1)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (push([1.0, 1.0]), "payload"),
        (push([1, 1, 1]), "payload"),
        (Message(Kind.PUSH), "payload"),
        (push([1.0, 1.0, 1.0], weight=math.nan), "numbers"),
        (push([1.0, 1.0, 1.0], weight=-1.0), "numbers"),
        (push([1.0, 1.0, 1.0])._replace(version=1), "numbers"),
        (push([1.0, 1.0, 1.0], step=1), "step"),
        (push([1.0, 1.0, 1.0], step=-1), "step"),
        (Message(Kind.PULL, torch.ones(3)), "payload"),
        (Message(Kind.LEAVE, step=1), "numbers"),
        (Message(Kind.PARAMETERS, torch.ones(3)), "sender"),
        (Message(Kind.CONFIGURE, torch.ones(3, dtype=torch.uint8)), "malformed"),
        (Message(Kind.JOIN), "kind"),
    ],
)
def test_what_no_worker_of_ours_sends_changes_nothing(message, reason):
    made = begun(0)
    with pytest.raises(RefusedMessage) as refused:
        made.on_message(1, message)
    assert refused.value.reason == reason
    made.on_message(0, push([1.0, 2.0, 3.0]))
    assert shown(made.on_message(1, push([3.0, 4.0, 5.0]))) == [
        (7, Kind.PUSH, [2.0]),
        (8, Kind.PUSH, [3.0, 4.0]),
    ]


def test_nothing_is_pushed_before_the_parameters_or_a_second_time():
    with pytest.raises(RefusedMessage):
        leaf(0).on_message(0, push([1.0, 1.0, 1.0]))
    made = begun(0)
    made.on_message(0, push([1.0, 1.0, 1.0]))
    with pytest.raises(RefusedMessage) as refused:
        made.on_message(0, push([1.0, 1.0, 1.0]))
    assert refused.value.reason == "order"
