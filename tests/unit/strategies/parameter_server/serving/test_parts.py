"""Servers that add up their shards' parts of the distances."""

import itertools

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.errors import RunError
from polyrhythm.strategies.aggregator import squared_distances
from polyrhythm.strategies.aggregators.krum import Krum
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.distance_exchange import DistanceExchange, summed
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan

SERVERS = (5, 6, 7)
WORKERS = (0, 1, 2, 3, 4)


def test_distances_of_shards_add_up_to_those_of_whole_gradients():
    gradients = list(torch.randint(-9, 9, (5, 12), generator=torch.Generator().manual_seed(0)).float())
    whole = squared_distances(gradients)
    cut = sum(squared_distances([g[place] for g in gradients]) for place in shards(12, 3))
    by_hand = [
        [sum((a - b) ** 2 for a, b in zip(x.tolist(), y.tolist(), strict=True)) for y in gradients]
        for x in gradients
    ]
    assert whole.tolist() == cut.tolist() == by_hand


def test_a_gradient_that_is_not_finite_marks_itself():
    found = squared_distances([torch.tensor([1.0]), torch.tensor([float("inf")]), torch.tensor([2.0])])
    assert found.diagonal().isfinite().tolist() == [True, False, True]


def test_parts_are_summed_in_the_order_of_the_servers_whenever_they_come():
    parts = [torch.full((2, 2), value, dtype=torch.float64) for value in (1e16, 1.0, -1e16)]
    expected = (parts[0] + parts[1]) + parts[2]
    for order in itertools.permutations(range(3)):
        ends = [DistanceExchange(SERVERS, index) for index in range(3)]
        sent = [(index, reply) for index in order for reply in ends[index].offer(parts[index])]
        for source, (to, message) in sent:
            assert ends[SERVERS.index(to)].all() is None
            ends[SERVERS.index(to)].on_message(SERVERS[source], message)
        for end in ends:
            assert torch.equal(summed(end.all()), expected)
            assert end.all() is None  # the next round has begun


def test_a_part_of_the_next_round_waits():
    end = DistanceExchange((5, 6), 0)
    one, two = DistanceExchange((5, 6), 1), torch.ones(1, 1, dtype=torch.float64)
    for value in (2.0, 30.0):
        [(_, message)] = one.offer(two * value)
        end.on_message(6, message)
        one.on_message(5, Message(Kind.VECTOR, two.flatten().view(torch.uint8), step=message.step))
        one.all()
    end.offer(two)
    assert summed(end.all()).tolist() == [[3.0]]
    end.offer(two)
    assert summed(end.all()).tolist() == [[31.0]]


def servers_of(count):
    roles = SERVERS[:count]
    made = {
        rank: shard_session(WORKERS, Synchronous(), Handling(aggregator=Krum(f=1)), roles, index)
        for index, rank in enumerate(roles)
    }
    for place, server in zip(shards(12, count), made.values(), strict=True):
        size = place.stop - place.start
        plan = OptimizerPlan("SGD", (Span(0, size, {"lr": 1.0}),), 1.0)
        server.on_message(0, Message(Kind.CONFIGURE, pack_json(plan.to_json())))
        server.on_message(0, Message(Kind.PARAMETERS, torch.zeros(size)))
    return made


def delivered(servers, source, to, message):
    """Hands a message over, and all that follows among servers; gives the answers to workers."""
    answers, queue = [], [(source, to, message)]
    while queue:
        source, to, message = queue.pop()
        for target, reply in servers[to].on_message(source, message):
            if target in servers:
                queue.append((to, target, reply))
            else:
                answers.append((to, target, reply))
    return answers


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_servers_choose_what_one_would(count):
    """Whichever gradient is Krum's choice as a whole; one that is near in a shard only, is not."""
    generator = torch.Generator().manual_seed(3)
    expected = torch.zeros(12)
    servers = servers_of(count)
    for step in range(4):
        gradients = list(torch.randint(-9, 9, (5, 12), generator=generator).float())
        answers = []
        for worker, gradient in enumerate(gradients):
            for rank, place in zip(servers, shards(12, count), strict=True):
                push = Message(Kind.PUSH, gradient[place].clone(), version=step, step=step, learning_rate=1.0)
                answers += delivered(servers, worker, rank, push)
        scores = []
        for one in gradients:
            away = sorted(float((one - other).square().sum()) for other in gradients)
            scores.append(sum(away[1:3]))  # itself comes first, then n - f - 2 = 2
        expected -= gradients[scores.index(min(scores))]
        assert len(answers) == 5 * count
        assert torch.equal(torch.cat([server.values for server in servers.values()]), expected)
        assert {server.version for server in servers.values()} == {step + 1}


def test_only_servers_send_parts():
    servers = servers_of(2)
    with pytest.raises(RunError, match="a server received VECTOR from rank 9, which pushes nothing here"):
        servers[5].on_message(9, Message(Kind.VECTOR, torch.zeros(8, dtype=torch.uint8)))
