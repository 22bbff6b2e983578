"""Pushes and answers that travel in parts, by hand-written messages, without any network."""

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.parts import whole_replies
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

SIZE = 7
PLAN = OptimizerPlan("SGD", (Span(0, SIZE, {"lr": 0.5}),), 0.5)


def server(consistency, pushers=(0, 1)):
    made = shard_session(pushers, consistency)
    made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
    made.on_message(0, Message(Kind.PARAMETERS, torch.zeros(SIZE)))
    return made


def part(numbers, start, step=0):
    return Message(Kind.PART, torch.as_tensor(numbers, dtype=torch.float32), version=start, step=step)


def push(numbers, step=0, version=0):
    gradient = torch.as_tensor(numbers, dtype=torch.float32)
    return Message(Kind.PUSH, gradient, version=version, step=step, weight=1.0, learning_rate=0.5)


def pushed(made, source, gradient, cuts, step=0, version=0):
    """Push a gradient whose parts begin at `cuts`, the last one first."""
    stop = SIZE
    for start in sorted(cuts, reverse=True):
        assert made.on_message(source, part(gradient[start:stop], start, step)) == []
        stop = start
    return made.on_message(source, push(gradient[:stop], step, version))


@pytest.mark.parametrize("cuts", [(), (3,), (2, 5), (1, 2, 3, 4, 5, 6), (0, 4)])
def test_parts_make_the_update_of_the_whole_and_are_answered_as_they_were_cut(cuts):
    gradient = torch.arange(1.0, SIZE + 1)
    whole, parts = server(Asynchronous()), server(Asynchronous())
    [(_, expected)] = whole.on_message(0, push(gradient))
    replies = pushed(parts, 0, gradient, cuts)
    assert torch.equal(parts.values, whole.values)
    assert parts.stats() == whole.stats()
    places = [0, *(cut for cut in cuts if cut)] if cuts else []
    assert [(reply.kind, reply.version) for _, reply in replies] == [
        (Kind.PARAMETERS, 1),
        *((Kind.PART, place) for place in places),
    ]
    [(to, joined)] = whole_replies(replies)
    assert to == 0
    assert torch.equal(joined.tensor, expected.tensor)
    assert (joined.version, joined.step) == (expected.version, expected.step)


def test_in_step_each_is_answered_as_it_pushed():
    made = server(Synchronous())
    gradient = torch.ones(SIZE)
    assert pushed(made, 1, gradient, (4,)) == []
    replies = pushed(made, 0, gradient, ())
    assert [(to, reply.kind, reply.tensor.numel()) for to, reply in replies] == [
        (0, Kind.PARAMETERS, SIZE),
        (1, Kind.PARAMETERS, 0),
        (1, Kind.PART, 4),
        (1, Kind.PART, 3),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        part([1.0], 5),  # not the end
        part([1.0], 7),  # behind it
        part([1.0, 1.0], -1),
        part([], SIZE),
        part([1.0], 6)._replace(tensor=torch.ones(1, dtype=torch.float64)),
        part([1.0], 6)._replace(tensor=None),
    ],
)
def test_a_first_part_that_does_not_lie_at_the_end_is_refused(wrong):
    made = server(Asynchronous())
    with pytest.raises(RefusedMessage):
        made.on_message(0, wrong)
    pushed(made, 0, torch.ones(SIZE), (4,))
    assert made.version == 1


def test_a_gap_a_part_twice_and_a_push_without_the_rest_are_refused():
    made = server(Asynchronous())
    made.on_message(0, part([1.0], 6))
    for wrong in (part([1.0], 4), part([1.0], 6), push([1.0, 1.0])):
        with pytest.raises(RefusedMessage):
            made.on_message(0, wrong)
    assert made.version == 0
    pushed(made, 0, torch.ones(SIZE), (4,))
    assert made.version == 1


def test_nothing_comes_of_parts_whose_pusher_is_lost_or_begins_anew():
    made = server(Asynchronous())
    made.on_message(1, part([1.0], 6))
    made.on_loss(1)
    made.on_message(1, Message(Kind.PULL))
    with pytest.raises(RefusedMessage):
        made.on_message(1, push(torch.ones(6)))
    assert pushed(made, 1, torch.ones(SIZE), (2,))
    made.on_message(1, part([1.0], 6, step=1))
    made.on_message(1, Message(Kind.PULL))
    assert pushed(made, 1, torch.ones(SIZE), (), step=1, version=1)[0][1].tensor.numel() == SIZE


def test_parts_before_the_parameters_and_from_strangers_are_refused():
    made = shard_session((0, 1), Asynchronous())
    for source in (0, 7):
        with pytest.raises(RefusedMessage):
            made.on_message(source, part([1.0], 6))
