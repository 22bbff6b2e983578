"""A server by hand-written messages, without any network."""

import json
from itertools import permutations

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


def answered(replies):
    return {rank: (message.tensor.tolist(), message.version, message.step) for rank, message in replies}


class TestSynchronous:
    def test_nobody_is_answered_before_the_last_gradient(self):
        made = server(Synchronous())
        assert made.on_message(5, push([4.0, 0.0, 0.0])) == []
        assert made.on_message(0, push([0.0, 2.0, 0.0])) == []
        replies = made.on_message(2, push([2.0, 1.0, 6.0]))
        new = [1.0 - 0.5 * 2, 2.0 - 0.5 * 1, 3.0 - 0.5 * 2]  # minus rate times the mean
        assert answered(replies) == dict.fromkeys((0, 2, 5), (new, 1, 1))
        assert made.version == 1
        assert made.staleness == {0: 3}

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

    def test_ragged_batches_count_for_their_samples(self):
        made = server(Synchronous())
        made.on_message(0, push([8.0, 0.0, 1.0], weight=1.0))
        made.on_message(2, push([0.0, 8.0, 1.0], weight=0.5))
        made.on_message(5, push([0.0, 0.0, 1.0], weight=0.25))
        torch.testing.assert_close(made.values, START - 0.5 * torch.tensor([8 / 1.75, 4 / 1.75, 1.0]))

    def test_an_empty_batch_takes_part_and_counts_for_nothing(self):
        made = server(Synchronous())
        made.on_message(0, push([2.0, 2.0, 2.0], weight=0.5))
        made.on_message(2, push([float("nan")] * 3, weight=0.0))
        replies = made.on_message(5, push([4.0, 4.0, 4.0], weight=0.5))
        assert answered(replies)[2] == ([-0.5, 0.5, 1.5], 1, 1)
        assert made.staleness == {0: 2}

    def test_only_empty_batches_change_nothing_but_are_answered(self):
        made = server(Synchronous())
        replies = [made.on_message(rank, push([0.0] * 3, weight=0.0)) for rank in PUSHERS]
        assert replies[:2] == [[], []]
        assert answered(replies[2]) == dict.fromkeys(PUSHERS, (START.tolist(), 0, 1))
        assert made.version == 0
        assert made.staleness == {}

    def test_a_pusher_that_leaves_is_not_waited_for(self):
        made = server(Synchronous())
        made.on_message(0, push([2.0, 0.0, 0.0]))
        made.on_message(2, push([4.0, 0.0, 0.0]))
        assert answered(made.on_message(5, Message(Kind.LEAVE))) == dict.fromkeys(
            (0, 2), ([-0.5, 2.0, 3.0], 1, 1)
        )
        made.on_message(0, push([0.0, 2.0, 0.0], version=1, step=1))
        assert sorted(answered(made.on_message(2, push([0.0, 2.0, 0.0], version=1, step=1)))) == [0, 2]

    def test_the_wish_to_stop_reaches_everyone_at_the_same_step(self):
        made = server(Synchronous())
        made.on_message(0, push([0.0] * 3))
        made.on_message(2, push([0.0] * 3, stop=True))
        replies = made.on_message(5, push([0.0] * 3))
        assert [message.stop for _, message in replies] == [True] * 3


class TestAsynchronous:
    def test_every_gradient_is_an_update_and_staleness_counts_by_hand(self):
        made = server(Asynchronous())
        read = {}
        stale = []
        for rank, step in [(0, 0), (2, 0), (0, 1), (5, 0), (5, 1), (2, 1)]:
            stale.append(made.version - read.get(rank, 0))
            [(to, answer)] = made.on_message(
                rank, push([1.0, 0.0, -1.0], version=read.get(rank, 0), step=step)
            )
            assert (to, answer.step) == (rank, step + 1)
            read[rank] = answer.version
        assert stale == [0, 1, 1, 3, 0, 3]
        assert made.staleness == {0: 2, 1: 2, 3: 2}
        assert made.version == 6
        assert made.values.tolist() == [1.0 - 3.0, 2.0, 3.0 + 3.0]

    def test_what_is_new_of_staleness_is_told_once(self):
        made = server(Asynchronous())
        for rank in PUSHERS:
            made.on_message(rank, push([1.0, 0.0, 0.0]))
        assert made.latest_staleness() == {0: 1, 1: 1, 2: 1}
        made.on_message(0, push([1.0, 0.0, 0.0], version=1, step=1))
        made.on_message(2, push([1.0, 0.0, 0.0], version=3, step=1))
        assert made.latest_staleness() == {2: 1, 1: 1}
        assert made.latest_staleness() == {}
        assert made.staleness == {0: 1, 1: 2, 2: 2}

    def test_momentum_lives_on_the_server(self):
        made = server(Asynchronous(), plan=sgd(momentum=0.5))
        made.on_message(0, push([4.0, 0.0, 0.0]))  # buffer 4
        made.on_message(2, push([0.0, 0.0, 0.0]))  # buffer 2
        made.on_message(5, push([1.0, 0.0, 0.0]))  # buffer 2
        assert made.values.tolist() == [1.0 - 0.5 * (4 + 2 + 2), 2.0, 3.0]

    def test_the_pushers_learning_rate_is_used(self):
        made = server(Asynchronous())
        made.on_message(0, push([1.0, 1.0, 1.0], rate=0.25))
        assert made.values.tolist() == [0.75, 1.75, 2.75]

    def test_a_repeated_step_is_answered_and_not_applied_again(self):
        made = server(Asynchronous())
        made.on_message(2, push([1.0, 0.0, 0.0]))
        [(to, answer)] = made.on_message(2, push([1.0, 0.0, 0.0]))
        assert (to, answer.tensor.tolist(), answer.version, answer.step) == (2, [0.5, 2.0, 3.0], 1, 1)
        assert made.staleness == {0: 1}

    def test_an_empty_batch_is_answered_and_counts_its_step(self):
        made = server(Asynchronous())
        assert answered(made.on_message(5, push([float("nan")] * 3, weight=0.0))) == {
            5: (START.tolist(), 0, 1)
        }
        assert made.version == 0

    def test_a_ragged_batch_is_no_smaller_step(self):
        made = server(Asynchronous())
        made.on_message(0, push([2.0, 0.0, 0.0], weight=0.25))
        assert made.values.tolist() == [0.0, 2.0, 3.0]

    def test_the_wish_to_stop_spreads(self):
        made = server(Asynchronous())
        [(_, before)] = made.on_message(0, push([0.0] * 3))
        made.on_message(2, push([0.0] * 3, stop=True))
        [(_, after)] = made.on_message(0, push([0.0] * 3, step=1))
        assert (before.stop, after.stop) == (False, True)


class TestLosses:
    def test_an_asynchronous_pushers_successor_goes_on_where_it_fell(self):
        made = server(Asynchronous())
        made.on_message(2, push([2.0, 0.0, 0.0]))
        assert made.on_loss(2) == []  # between push and answer, or later: the push counts
        assert made.steps == {0: 0, 2: 1, 5: 0}
        assert answered(made.on_message(2, Message(Kind.PULL))) == {2: ([0.0, 2.0, 3.0], 1, 1)}
        # another shard may have missed that push: its repetition is answered here, and not applied
        assert answered(made.on_message(2, push([2.0, 0.0, 0.0], version=1))) == {2: ([0.0, 2.0, 3.0], 1, 1)}
        assert answered(made.on_message(2, push([0.0, 2.0, 0.0], version=1, step=1))) == {
            2: ([0.0, 1.0, 3.0], 2, 2)
        }
        assert (made.version, made.steps) == (2, {0: 0, 2: 2, 5: 0})

    def test_the_final_pull_waits_for_those_that_are_left(self):
        made = server(Asynchronous())
        made.on_message(5, Message(Kind.LEAVE))
        made.on_message(0, Message(Kind.LEAVE))
        assert made.on_message(0, Message(Kind.PULL, stop=True)) == []
        assert answered(made.on_loss(2)) == {0: ([1.0, 2.0, 3.0], 0, 0)}
        made.on_message(0, Message(Kind.LEAVE))
        assert made.done

    def test_a_successor_that_comes_after_the_final_pull_is_told_to_leave(self):
        """Another server may have given its final parameters already: two ends of one run must be one."""
        made = server(Asynchronous())
        made.on_loss(2)
        made.on_message(0, Message(Kind.LEAVE))
        assert made.on_message(0, Message(Kind.PULL, stop=True)) == []  # 5 is still there
        ((to, reply),) = made.on_message(2, Message(Kind.PULL))
        assert (to, reply.kind, reply.tensor) == (2, Kind.LEAVE, None)
        assert answered(made.on_message(5, Message(Kind.LEAVE))) == {0: ([1.0, 2.0, 3.0], 0, 0)}
        ((_, again),) = made.on_message(2, Message(Kind.PULL))  # also while the others' finals are fetched
        assert again.kind is Kind.LEAVE
        assert not made.done

    def test_the_final_pull_waits_for_a_successor(self):
        made = server(Asynchronous())
        made.on_loss(2)
        made.on_message(2, Message(Kind.PULL))
        made.on_message(5, Message(Kind.LEAVE))
        made.on_message(0, Message(Kind.LEAVE))
        assert made.on_message(0, Message(Kind.PULL, stop=True)) == []
        assert not made.done
        assert answered(made.on_message(2, Message(Kind.LEAVE))) == {0: ([1.0, 2.0, 3.0], 0, 0)}

    def test_a_pusher_that_was_lost_twice_is_left_once(self):
        made = server(Asynchronous())
        made.on_message(0, Message(Kind.LEAVE))
        made.on_message(0, Message(Kind.PULL, stop=True))
        for _ in range(2):
            assert made.on_loss(2) == []
        assert not made.done
        assert answered(made.on_loss(5)) == {0: ([1.0, 2.0, 3.0], 0, 0)}

    def test_who_asked_before_there_were_parameters_and_died_gets_no_answer(self):
        made = shard_session(PUSHERS, Asynchronous())
        made.on_message(2, Message(Kind.PULL))
        made.on_message(5, Message(Kind.PULL))
        made.on_loss(2)
        made.on_message(0, Message(Kind.CONFIGURE, pack_json(sgd().to_json())))
        assert list(answered(made.on_message(0, Message(Kind.PARAMETERS, START.clone())))) == [5]

    def test_the_loss_of_one_that_holds_the_others_up_sets_them_free(self):
        made = server(Synchronous())
        made.on_message(5, push([4.0, 0.0, 0.0]))
        made.on_message(0, push([2.0, 0.0, 0.0]))
        new = [1.0 - 0.5 * 3, 2.0, 3.0]
        assert answered(made.on_loss(2)) == dict.fromkeys((0, 5), (new, 1, 1))

    def test_the_loss_of_a_stranger_is_no_news(self):
        made = server(Asynchronous())
        assert made.on_loss(7) == []
        assert not made.done


def test_a_pull_before_there_are_parameters_is_answered_later():
    made = shard_session(PUSHERS, Asynchronous())
    assert made.on_message(5, Message(Kind.PULL)) == []
    assert made.on_message(2, Message(Kind.PULL)) == []
    assert made.on_message(0, Message(Kind.CONFIGURE, pack_json(sgd().to_json()))) == []
    replies = made.on_message(0, Message(Kind.PARAMETERS, START.clone()))
    assert [rank for rank, _ in replies] == [5, 2]
    assert answered(replies)[5] == (START.tolist(), 0, 0)
    assert answered(made.on_message(0, Message(Kind.PULL))) == {0: (START.tolist(), 0, 0)}


@pytest.mark.parametrize("consistency", [Asynchronous(), Synchronous()], ids=str)
def test_the_final_parameters_come_when_all_have_left(consistency):
    made = server(consistency)
    assert made.on_message(5, Message(Kind.LEAVE)) == []
    assert made.on_message(0, Message(Kind.LEAVE)) == []
    assert made.on_message(0, Message(Kind.PULL, stop=True)) == []
    assert not made.done
    assert answered(made.on_message(2, Message(Kind.LEAVE))) == {0: (START.tolist(), 0, 0)}
    assert not made.done  # another server may still have something to answer
    assert made.on_message(0, Message(Kind.LEAVE)) == []
    assert made.done


def test_the_final_parameters_come_at_once_if_all_have_left_already():
    made = server(Asynchronous())
    for rank in PUSHERS:
        assert made.on_message(rank, Message(Kind.LEAVE)) == []
    assert not made.done
    assert answered(made.on_message(0, Message(Kind.PULL, stop=True))) == {0: (START.tolist(), 0, 0)}
    assert made.on_message(0, Message(Kind.LEAVE)) == []
    assert made.done


@pytest.mark.parametrize("consistency", [Asynchronous(), Synchronous()], ids=str)
def test_state_goes_round_in_the_middle_of_a_run(consistency):
    first = server(consistency, plan=sgd(momentum=0.5))
    for step in range(2):
        for rank in PUSHERS:
            first.on_message(rank, push([1.0, -1.0, float(rank)], version=first.version, step=step))
    tensors, facts = unpack_tensors(pack_tensors(*first.state()))  # as it travels and lies on disk
    assert facts == json.loads(json.dumps(facts))
    second = shard_session(PUSHERS, consistency)
    second.load_state((tensors, facts))
    second.on_message(0, Message(Kind.CONFIGURE, pack_json(sgd(momentum=0.5).to_json())))
    assert second.on_message(2, Message(Kind.PULL)) == []
    resumed = second.on_message(0, Message(Kind.PARAMETERS, torch.full((3,), 99.0)))
    assert answered(resumed) == {2: (first.values.tolist(), first.version, 2)}
    for rank in PUSHERS:
        message = push([0.5, 0.0, 0.0], version=first.version, step=2)
        before, after = first.on_message(rank, message), second.on_message(rank, message)
        assert answered(before) == answered(after)
    assert torch.equal(first.values, second.values)
    assert (first.version, first.staleness) == (second.version, second.staleness)
    assert second.on_message(2, push([1.0, 1.0, 1.0], step=1))[0][1].tensor.tolist() == first.values.tolist()


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
