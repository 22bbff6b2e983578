"""A server by hand-written messages, without any network."""

from itertools import permutations

import pytest
import torch

from polyrhythm.communication.message import (
    Kind,
    Message,
    RefusedMessage,
    pack_json,
)
from polyrhythm.errors import RunError
from polyrhythm.strategies.aggregators.krum import Krum
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

PUSHERS = (0, 2, 5)  # ranks; the gates number them 0, 1, 2
START = torch.tensor([1.0, 2.0, 3.0])


def sgd(momentum=0.0):
    return OptimizerPlan("SGD", (Span(0, 3, {"lr": 0.5, "momentum": momentum}),), 0.5)


def server(consistency, pushers=PUSHERS, plan=None, start=START):
    made = shard_session(pushers, consistency)
    assert made.on_message(pushers[0], Message(Kind.CONFIGURE, pack_json((plan or sgd()).to_json()))) == []
    assert made.on_message(pushers[0], Message(Kind.PARAMETERS, start.clone())) == []
    return made


def push(values, version=0, step=0, weight=1.0, rate=0.5, stop=False):
    gradient = torch.tensor(values) if isinstance(values, list) else values
    return Message(
        Kind.PUSH, gradient, version=version, step=step, weight=weight, learning_rate=rate, stop=stop
    )


class TestSynchronous:
    def test_the_order_of_arrival_does_not_change_a_bit(self):
        generator = torch.Generator().manual_seed(0)
        gradients = {rank: torch.randn(101, generator=generator) * 10.0**rank for rank in PUSHERS}
        plan = OptimizerPlan("SGD", (Span(0, 101, {"lr": 0.1}),), 0.1)
        in_rank_order = torch.zeros(101) - 0.1 * ((gradients[0] + gradients[2]) + gradients[5]) / 3
        results = []
        for order in permutations(PUSHERS):
            made = server(Synchronous(), plan=plan, start=torch.zeros(101))
            for rank in order:
                made.on_message(rank, push(gradients[rank], rate=0.1))
            results.append(made.values)
        assert all(torch.equal(results[0], result) for result in results)
        torch.testing.assert_close(results[0], in_rank_order)
        other_order = (gradients[5] + gradients[2]) + gradients[0]
        assert not torch.equal((gradients[0] + gradients[2]) + gradients[5], other_order), (
            "the order does matter"
        )


def test_a_stranger_is_named():
    made = server(Asynchronous())
    with pytest.raises(RunError, match=r"^a server received PUSH from rank 1, which pushes nothing here$"):
        made.on_message(1, push([0.0] * 3))


def test_a_message_that_makes_no_sense_is_named():
    made = server(Asynchronous())
    with pytest.raises(RunError, match=r"^a server cannot do anything with DIFFERENCE from rank 2$"):
        made.on_message(2, Message(Kind.DIFFERENCE, torch.zeros(3)))
    with pytest.raises(RunError, match=r"^a PUSH arrived without its tensor$"):
        made.on_message(2, Message(Kind.PUSH))
    with pytest.raises(RunError, match=r"^a CONFIGURE arrived without its tensor$"):
        shard_session(PUSHERS, Asynchronous()).on_message(2, Message(Kind.CONFIGURE))


def test_a_plan_of_an_unknown_class_is_refused():
    made = shard_session(PUSHERS, Asynchronous())
    with pytest.raises(RefusedMessage, match=r"names 'LBFGS', which is none of ours"):
        made.on_message(0, Message(Kind.CONFIGURE, pack_json({"kind": "LBFGS", "spans": [], "rate": 0.1})))


class TestKrumAlone:
    """A server that is alone, whose workers come back wildly."""

    def krum(self):
        made = shard_session(PUSHERS, Synchronous(), Handling(aggregator=Krum(f=0)))
        made.on_message(0, Message(Kind.CONFIGURE, pack_json(sgd().to_json())))
        made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
        return made

    def test_who_has_not_come_in_takes_no_part(self):
        """Else two gradients of one worker were compared, as if they were two workers'."""
        made = self.krum()
        made.on_message(2, push([1.0, 0.0, 0.0]))
        made.on_loss(2)  # what it pushed goes along with the others'
        [(_, invitation)] = made.on_message(2, Message(Kind.PULL))
        assert (invitation.kind, invitation.step) == (Kind.JOIN, 1)
        for when in ("asked", "coming"):
            with pytest.raises(RefusedMessage, match="before the round that it joins at"):
                made.on_message(2, push([9.0, 0.0, 0.0]))
            if when == "asked":
                assert made.on_message(2, Message(Kind.JOIN, step=1)) == []
        with pytest.raises(RefusedMessage, match="before the round that it joins at"):
            made.on_message(2, Message(Kind.PULL))
        made.on_message(0, push([1.0, 0.0, 0.0]))
        replies = made.on_message(5, push([-50.0, 0.0, 0.0]))
        assert [rank for rank, _ in replies] == [0, 2, 5]
        assert all(message.tensor.tolist() == [0.5, 2.0, 3.0] for _, message in replies)

    def test_who_has_left_takes_no_part(self):
        made = self.krum()
        made.on_message(5, Message(Kind.LEAVE))
        with pytest.raises(RefusedMessage, match="from rank 5, which had left"):
            made.on_message(5, push([1.0, 0.0, 0.0]))

    def test_two_gradients_of_one_worker_are_compared(self):
        """With softsync nobody waits: a quick worker has two of the three gradients of an update."""
        made = shard_session(PUSHERS, Softsync(), Handling(aggregator=Krum(f=0)))
        made.on_message(0, Message(Kind.CONFIGURE, pack_json(sgd().to_json())))
        made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
        for rank in PUSHERS:
            made.on_message(rank, Message(Kind.PULL))
        made.on_message(2, push([1.0, 0.0, 0.0], step=0))
        made.on_message(2, push([1.25, 0.0, 0.0], step=1))
        made.on_message(5, push([90.0, 0.0, 0.0], step=0))
        assert made.version == 1
        assert made.values.tolist() == [0.5, 2.0, 3.0]  # a tie of the first two: as in the paper, the first
