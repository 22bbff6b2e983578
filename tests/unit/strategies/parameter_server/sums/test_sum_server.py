"""Downpour's server by hand-written messages, without any network."""

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json, pack_tensors, unpack_tensors
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.downpour import sum_session
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

WORKERS = (0, 2, 5)  # ranks
START = torch.tensor([1.0, 2.0, 3.0])
MOMENTUM = OptimizerPlan("SGD", (Span(0, 3, {"lr": 0.5, "momentum": 0.5}),), 0.5)
PLAIN = OptimizerPlan("SGD", (Span(0, 3, {"lr": 0.5}),), 0.5)


def server(warm_start_steps=0, plan=PLAIN):
    made = sum_session(WORKERS, warm_start_steps)
    begin(made, plan)
    return made


def begin(made, plan=PLAIN):
    assert made.on_message(0, Message(Kind.CONFIGURE, pack_json(plan.to_json()))) == []
    return made.on_message(0, Message(Kind.PARAMETERS, START.clone()))


def push(values, step=0, count=1.0, version=0, stop=False):
    return Message(
        Kind.PUSH,
        torch.tensor(values),
        version=version,
        step=step,
        weight=count,
        learning_rate=0.5,
        stop=stop,
    )


def values(made, rank=0, kind=Kind.FETCH):
    [(to, reply)] = made.on_message(rank, Message(kind))
    assert (to, reply.kind) == (rank, Kind.PARAMETERS)
    return reply.tensor.tolist()


def test_a_push_is_applied_and_not_answered():
    made = server()
    assert made.on_message(2, push([2.0, 0.0, -2.0], step=3, count=4.0)) == []
    assert values(made) == [0.0, 2.0, 4.0]
    assert (made.version, made.steps, made.staleness) == (1, {0: 0, 2: 4, 5: 0}, {0: 4})
    made.on_message(5, push([0.0, 2.0, 0.0], version=0))
    assert made.staleness == {0: 4, 1: 1}


def test_a_sum_that_was_applied_is_not_applied_again():
    made = server(plan=MOMENTUM)
    for _ in range(2):
        made.on_message(2, push([2.0, 0.0, 0.0], step=0))
    assert values(made) == [0.0, 2.0, 3.0]
    assert made.version == 1


def test_a_sum_of_empty_batches_counts_its_steps_and_changes_nothing():
    made = server(plan=MOMENTUM)
    made.on_message(2, push([0.0, 0.0, 0.0], step=1, count=0.0))
    assert (made.version, made.steps[2]) == (0, 2)


def test_what_was_answered_does_not_change_with_the_shard():
    made = server()
    [(_, reply)] = made.on_message(2, Message(Kind.FETCH))
    made.on_message(2, push([1.0, 1.0, 1.0]))
    assert torch.equal(reply.tensor, START)


class TestWarmStart:
    def test_the_others_wait_for_worker_0s_first_steps(self):
        made = server(warm_start_steps=3)
        assert made.on_message(2, Message(Kind.PULL)) == []
        assert values(made, 0, Kind.PULL) == START.tolist()
        assert made.on_message(0, push([2.0, 0.0, 0.0], step=0)) == []
        assert made.on_message(5, Message(Kind.PULL)) == []
        released = made.on_message(0, push([2.0, 0.0, 0.0], step=2, count=2.0))
        assert [to for to, _ in released] == [2, 5]
        assert all(reply.tensor.tolist() == [-1.0, 2.0, 3.0] for _, reply in released)

    @pytest.mark.parametrize(
        "message", [Message(Kind.FETCH, stop=True), push([0.0, 0.0, 0.0], stop=True), Message(Kind.LEAVE)]
    )
    def test_nobody_waits_for_a_worker_0_that_stops(self, message):
        made = server(warm_start_steps=3)
        made.on_message(2, Message(Kind.PULL))
        replies = made.on_message(0, message)
        assert (2, Kind.PARAMETERS) in [(to, reply.kind) for to, reply in replies]


def test_who_asks_before_there_are_parameters_is_answered_when_there_are():
    made = sum_session(WORKERS, 0)
    assert made.on_message(5, Message(Kind.PULL)) == []
    [(to, reply)] = begin(made)
    assert to == 5
    assert torch.equal(reply.tensor, START)


def test_a_lost_worker_counts_and_its_successor_hears_how_much():
    made = server()
    made.on_message(2, push([2.0, 0.0, 0.0], step=4))
    assert made.on_loss(2) == []
    [(_, reply)] = made.on_message(2, Message(Kind.PULL))
    assert reply.step == 5
    assert made.on_loss(7) == []


def test_the_final_parameters_wait_for_all_and_the_second_leave_ends_it():
    made = server()
    made.on_message(0, Message(Kind.LEAVE))
    assert made.on_message(0, Message(Kind.PULL, stop=True)) == []
    made.on_message(2, Message(Kind.LEAVE))
    assert made.on_message(2, Message(Kind.PULL))[0][1].kind is Kind.LEAVE
    [(to, reply)] = made.on_message(5, Message(Kind.LEAVE))
    assert (to, reply.kind, made.done) == (0, Kind.PARAMETERS, False)
    made.on_message(0, Message(Kind.LEAVE))
    assert made.done


def test_state_survives_the_wire_with_the_optimizers():
    made = server(plan=MOMENTUM)
    made.on_message(2, push([2.0, 0.0, -2.0], step=0))
    copy = sum_session(WORKERS, 0)
    copy.load_state(unpack_tensors(pack_tensors(*made.state())))
    begin(copy, MOMENTUM)
    for each in (made, copy):
        each.on_message(5, push([1.0, 1.0, 1.0]))
    assert values(copy) == values(made) == [-1.0, 1.5, 4.0]  # 1 - 1 - (0.5 * 2 + 1) / 2, …
    assert (copy.version, copy.steps, copy.staleness) == (made.version, made.steps, made.staleness)


def test_what_no_worker_sends_is_named():
    made = server()
    with pytest.raises(RunError, match="received PUSH from rank 1, which pushes nothing here"):
        made.on_message(1, push([0.0, 0.0, 0.0]))
    with pytest.raises(RunError, match="cannot do anything with VECTOR from rank 2"):
        made.on_message(2, Message(Kind.VECTOR, torch.zeros(3)))


def test_a_warm_start_is_no_longer_than_the_run():
    """Worker 0 takes two steps in all; the others have their first parameters when it has taken them."""
    made = sum_session(WORKERS, 50)
    made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAIN.to_json()), step=2))
    made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
    assert made.on_message(2, Message(Kind.PULL)) == []
    assert made.on_message(0, push([2.0, 0.0, 0.0], step=0)) == []
    [(rank, reply)] = made.on_message(0, push([2.0, 0.0, 0.0], step=1))
    assert (rank, reply.tensor.tolist()) == (2, [-1.0, 2.0, 3.0])


def test_a_pull_that_is_repeated_during_a_warm_start_is_answered_once():
    """That of a replacement may arrive before the notice of the loss."""
    made = server(warm_start_steps=2)
    for _ in range(2):
        assert made.on_message(2, Message(Kind.PULL)) == []
    made.on_message(0, push([0.0, 0.0, 0.0], step=0))
    assert [to for to, _ in made.on_message(0, push([0.0, 0.0, 0.0], step=1))] == [2]
