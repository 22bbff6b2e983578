"""A leaf by hand-written messages, without any network: workers 0, 1, 2 of 0 … 4; leaves 5, 6; roots 7, 8."""

import math

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json, unpack_json
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.hierarchical import LeafSession, Levels, RootSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

CAST = RoleAssignment((0, 1, 2, 3, 4), (5, 6, 7, 8))
PLAN = OptimizerPlan("SGD", (Span(0, 3, {"lr": 0.5}),), 0.5)


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


def test_one_mean_goes_up_weighted_with_its_samples():
    made = begun(1)
    assert made.on_message(4, push([8.0, 0.0, 0.0], weight=0.5)) == []
    assert made.on_message(2, push([2.0, 4.0, 5.0])) == []
    replies = made.on_message(3, push([4.0, 6.0, 15.0], stop=True))
    assert shown(replies) == [(7, Kind.PUSH, [4.0]), (8, Kind.PUSH, [4.0, 8.0])]  # 10, 10, 20 of 2.5
    assert [(reply.weight, reply.stop, reply.learning_rate) for _, reply in replies] == [(2.5, True, 0.5)] * 2


def test_only_empty_batches_weigh_nothing():
    made = begun(0)
    made.on_message(0, push([0.0, 0.0, 0.0], weight=0.0))
    replies = made.on_message(1, push([0.0, 0.0, 0.0], weight=0.0))
    assert [reply.weight for _, reply in replies] == [0.0, 0.0]


def test_the_roots_answers_are_put_together_for_all_of_the_group():
    made = begun(1)
    for worker in (2, 3, 4):
        made.on_message(worker, push([1.0, 1.0, 1.0]))
    assert made.on_message(8, from_root([5.0, 6.0], version=4)) == []
    replies = made.on_message(7, from_root([4.0], version=3, step=1, stop=True))
    assert shown(replies) == [(worker, Kind.PARAMETERS, [4.0, 5.0, 6.0]) for worker in (2, 3, 4)]
    assert all((reply.step, reply.stop) == (1, True) for _, reply in replies)
    assert (made.version, made.steps) == (1, {2: 1, 3: 1, 4: 1})
    for worker in (2, 3):
        made.on_message(worker, push([1.0, 1.0, 1.0], step=1))
    assert [reply.version for _, reply in made.on_message(4, push([1.0, 1.0, 1.0], step=1))] == [3, 4]


def test_a_pull_waits_for_the_whole_group():
    made = leaf(0)
    assert made.on_message(1, Message(Kind.PULL)) == []
    assert shown(made.on_message(0, Message(Kind.PULL))) == [(7, Kind.PULL, None), (8, Kind.PULL, None)]
    made.on_message(7, from_root([4.0], kind=Kind.PARAMETERS))
    replies = made.on_message(8, from_root([5.0, 6.0], kind=Kind.PARAMETERS))
    assert {to for to, _ in replies} == {0, 1}
    assert made.version == 0


def test_worker_0_initialises_the_roots_through_its_leaf():
    made = leaf(0)
    assert made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json()))) == []
    replies = made.on_message(0, Message(Kind.PARAMETERS, torch.tensor([1.0, 2.0, 3.0])))
    assert [(to, reply.kind) for to, reply in replies] == [
        (7, Kind.CONFIGURE), (7, Kind.PARAMETERS), (8, Kind.CONFIGURE), (8, Kind.PARAMETERS),
    ]  # fmt: skip
    spans = [unpack_json(reply.tensor)["spans"][0] for _, reply in replies[::2]]
    assert [(span["start"], span["stop"]) for span in spans] == [(0, 1), (0, 2)]
    assert [reply.tensor.tolist() for _, reply in replies[1::2]] == [[1.0], [2.0, 3.0]]


def test_the_last_of_a_group_takes_the_leafs_leave_and_worker_0_lets_all_servers_go():
    first, second = leaf(0), leaf(1)
    assert first.on_message(0, Message(Kind.LEAVE)) == []
    assert shown(first.on_message(0, Message(Kind.PULL, stop=True))) == [
        (7, Kind.PULL, None),
        (8, Kind.PULL, None),
    ]
    assert shown(first.on_message(1, Message(Kind.LEAVE))) == [(7, Kind.LEAVE, None), (8, Kind.LEAVE, None)]
    assert not first.done
    assert shown(first.on_message(0, Message(Kind.LEAVE))) == [(rank, Kind.LEAVE, None) for rank in (6, 7, 8)]
    assert first.done
    assert second.on_message(5, Message(Kind.LEAVE)) == []
    assert second.done


def test_a_root_answers_pushes_and_pulls_with_different_kinds():
    root = shard_session((5, 6), Synchronous(), session=RootSession)
    root.on_message(5, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    root.on_message(5, Message(Kind.PARAMETERS, torch.tensor([1.0, 2.0, 3.0])))
    [(_, pulled)] = root.on_message(6, Message(Kind.PULL))
    assert pulled.kind is Kind.PARAMETERS
    assert root.on_message(6, push([2.0, 0.0, 0.0], weight=3.0)) == []
    replies = root.on_message(5, push([0.0, 2.0, 0.0], weight=1.0))
    assert shown(replies) == [(rank, Kind.VECTOR, [0.25, 1.75, 3.0]) for rank in (5, 6)]
    assert (root.version, root.staleness, root.steps, root.done) == (1, {0: 2}, {5: 1, 6: 1}, False)


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
