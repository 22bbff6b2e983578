"""Sandblaster's server by hand-written messages, without any network."""

import pytest
import torch

from polyrhythm.communication.message import (
    Kind,
    Message,
    RefusedMessage,
    pack_json,
    pack_tensors,
    unpack_tensors,
)
from polyrhythm.strategies.parameter_server.sandblaster import Sandblaster, batch_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

WORKERS = (0, 2)
START = torch.tensor([1.0, 2.0])
PLAN = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5}),), 0.5)
SEARCH = Sandblaster(memory=3, trials=0, tolerance=0.0)


def server(servers=(1,), index=0, search=SEARCH):
    made = batch_session(ServerSetting(index, RoleAssignment(WORKERS, servers)), search)
    made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
    return made


def push(values, step=1, weight=2.0, version=0, rate=0.5):
    tensor = torch.tensor(values)
    return Message(Kind.PUSH, tensor, version=version, step=step, weight=weight, learning_rate=rate)


def test_a_batch_is_the_weighted_mean_of_all_and_answers_all():
    made = server()
    assert made.on_message(2, push([4.0, 0.0], weight=1.0)) == []
    replies = made.on_message(0, push([1.0, 3.0], weight=2.0))
    assert [to for to, _ in replies] == [0, 2]
    for _, reply in replies:
        assert (reply.kind, reply.version, reply.step) == (Kind.PARAMETERS, 1, 2)
        assert reply.tensor.tolist() == [0.0, 1.0]  # the mean is (2, 2)
    assert (made.version, made.steps, made.staleness) == (1, {0: 2, 2: 2}, {0: 4})


def test_the_second_step_knows_the_curvature():
    made = server()
    for rank in WORKERS:
        made.on_message(rank, push([2.0, 0.0]))
    for (
        rank
    ) in WORKERS:  # it fell from 2 to 1.5 on a way of 1: it is 0 another 3 away, and the rate takes half
        replies = made.on_message(rank, push([1.5, 0.0], step=3, version=1))
    assert replies[0][1].tensor.tolist() == [0.0 - 1.5, 2.0]


def test_a_batch_of_empty_portions_counts_its_steps_and_changes_nothing():
    made = server()
    made.on_message(2, push([0.0, 0.0], weight=0.0))
    replies = made.on_message(0, push([0.0, 0.0], weight=0.0))
    assert [reply.tensor.tolist() for _, reply in replies] == [START.tolist()] * 2
    assert (made.version, made.steps, made.staleness) == (0, {0: 2, 2: 2}, {})


def test_servers_tell_each_other_scalars_and_wait_for_all():
    first, second = (server((1, 3), index) for index in (0, 1))
    for made, values in ((first, [3.0, 0.0]), (second, [0.0, 4.0])):
        assert made.on_message(0, push(values)) == []
        [(to, told)] = made.on_message(2, push(values))
        assert (to, told.kind) == (3 if made is first else 1, Kind.VECTOR)
        assert told.tensor.view(torch.float64).tolist() == [values[0] ** 2 + values[1] ** 2]
        last = told
    [(_, reply), _] = first.on_message(3, last)
    assert reply.tensor.tolist() == [-0.5, 2.0]


def test_state_survives_the_wire():
    made, copy = server(), batch_session(ServerSetting(0, RoleAssignment(WORKERS, (1,))), SEARCH)
    for rank in WORKERS:
        made.on_message(rank, push([2.0, 1.0]))
    made.on_message(0, push([9.0, 9.0], step=2, version=1))  # its sender repeats it when resumed
    copy.load_state(unpack_tensors(pack_tensors(*made.state())))
    copy.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    copy.on_message(0, Message(Kind.PARAMETERS, START.clone()))
    copy.on_message(0, push([9.0, 9.0], step=2, version=1))
    for each in (made, copy):
        replies = each.on_message(2, push([-8.0, -8.5], step=2, version=1))
    assert (copy.version, copy.steps, copy.staleness) == (made.version, made.steps, made.staleness)
    assert torch.equal(replies[0][1].tensor, made.on_message(0, Message(Kind.PULL))[0][1].tensor)


def test_a_batch_that_is_over_is_answered_and_not_applied_again():
    made = server()
    for rank in WORKERS:
        made.on_message(rank, push([2.0, 0.0]))
    [(to, reply)] = made.on_message(2, push([2.0, 0.0]))
    assert (to, reply.tensor.tolist(), made.version) == (2, [0.0, 2.0], 1)


def test_the_final_parameters_wait_for_all_and_the_second_leave_ends_it():
    made = server()
    made.on_message(0, Message(Kind.LEAVE))
    assert made.on_message(0, Message(Kind.PULL, stop=True)) == []
    [(to, reply)] = made.on_message(2, Message(Kind.LEAVE))
    assert (to, reply.tensor.tolist(), made.done) == (0, START.tolist(), False)
    made.on_message(0, Message(Kind.LEAVE))
    assert made.done


def test_what_nobody_sends_is_refused_and_changes_nothing():
    made = server((1, 3))
    made.on_message(0, push([1.0, 1.0]))
    for source, message, words in [
        (0, push([1.0, 1.0], step=3), "its batch is not over"),
        (2, push([1.0]), "a gradient of 1 numbers"),
        (2, push([1.0, 1.0], weight=-1.0), "weight -1"),
        (2, push([1.0, 1.0], version=1), "version 1"),
        (5, push([1.0, 1.0]), "which pushes nothing here"),
        (2, Message(Kind.VECTOR, torch.zeros(2)), "cannot do anything with VECTOR"),
        (2, Message(Kind.PULL, stop=True), "asked for the final parameters"),
        (3, Message(Kind.VECTOR, torch.zeros(3)), "is no square"),
    ]:
        with pytest.raises(RefusedMessage, match=words):
            made.on_message(source, message)
    assert (made.version, made.steps) == (0, {0: 0, 2: 0})
