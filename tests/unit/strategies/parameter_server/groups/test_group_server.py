"""The server of groups by hand-written messages: groups 0, 1 and 2, 3; servers 4 and 5."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.control_message import VIEW_TAG, MembershipView, StepBroken
from polyrhythm.communication.log import Report
from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.groups.group_server import Dismissal, GroupServer
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

CAST = RoleAssignment((0, 1, 2, 3), (4, 5))
PLAN = OptimizerPlan("SGD", (Span(0, 1, {"lr": 1.0}),), 1.0)
PULL, LEAVE = Message(Kind.PULL), Message(Kind.LEAVE)


def begun(index: int = 0, pushes: int = 3) -> GroupServer:
    """A server that every group has pulled from, of a run of so many pushes."""
    made = GroupServer([(0, 1), (2, 3)], Asynchronous(), Handling(), ServerSetting(index, CAST))
    made.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json()), step=pushes))
    made.on_message(0, Message(Kind.PARAMETERS, torch.zeros(1)))
    for speaker in (0, 2):
        made.on_message(speaker, PULL)
    return made


def push(value: float, step: int = 0) -> Message:
    return Message(Kind.PUSH, torch.tensor([value]), step=step, learning_rate=1.0)


def shown(replies: list[Reply]) -> list[tuple[int, Kind, int, float | None]]:
    return [
        (to, reply.kind, reply.step, None if reply.tensor is None or reply.tag else reply.tensor.item())
        for to, reply in replies
    ]


def broken(number: int = 0, steps: int = 0, since: int = 0) -> Message:
    return StepBroken(number=number, report=Report(steps=steps, since=since)).message()


RETURNS = StepBroken(number=0, report=Report(), generation=1).message()


def members(word: Message) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    view = MembershipView.from_message(word)
    return view.number, view.workers, view.generations


def test_another_speaks_under_the_groups_name_after_what_was_taken() -> None:
    server = begun()
    server.on_message(2, push(1.0))
    assert server.on_loss(2) == []
    ((to, word),) = server.on_message(3, broken())
    assert (to, word.tag, members(word)) == (3, VIEW_TAG, (1, (3,), (0,)))
    assert shown(server.on_message(3, PULL)) == [(3, Kind.PARAMETERS, 1, -1.0)]
    assert shown(server.on_message(3, push(1.0, step=0))) == [(3, Kind.PARAMETERS, 1, -1.0)]  # again
    assert shown(server.on_message(3, push(2.0, step=1))) == [(3, Kind.PARAMETERS, 2, -3.0)]
    assert server.steps == {0: 0, 1: 0, 2: 2, 3: 2}


def test_a_pull_waits_until_the_loss_of_who_spoke_before_is_known() -> None:
    server = begun(index=1)
    assert server.on_message(3, PULL) == []
    assert shown(server.on_message(2, push(1.0))) == [(2, Kind.PARAMETERS, 1, -1.0)]  # it was under way
    assert shown(server.on_loss(2)) == [(4, Kind.REPORT, 1, None), (3, Kind.PARAMETERS, 1, -1.0)]
    with pytest.raises(RefusedMessage, match="PUSH from rank 2, which is no group's sender"):
        server.on_message(2, push(1.0, step=1))


def test_a_successor_is_let_in_when_the_speaker_has_broken_off() -> None:
    server = begun()
    server.on_loss(3)
    server.on_message(2, broken())
    assert shown(server.on_message(3, RETURNS)) == [(2, Kind.REGROUP_AT, 0, None)]
    words = server.on_message(2, broken(1))
    assert [to for to, _ in words] == [2, 3]
    assert members(words[0][1]) == (2, (2, 3), (0, 1))
    with pytest.raises(RefusedMessage, match="rank 3 requested admission, and is present"):
        server.on_message(3, StepBroken(number=0, report=Report(), generation=2).message())


def test_who_asks_of_a_group_that_is_through_is_told_so_once_all_servers_have_its_last_step() -> None:
    server = begun(pushes=1)
    server.on_message(2, push(1.0))
    server.on_loss(2)
    assert server.on_message(3, broken()) != []  # the other server may not have the step: it goes on
    server = begun(pushes=1)
    server.on_message(2, push(1.0))
    server.on_message(5, Message(Kind.REPORT, version=2, step=1))
    server.on_loss(2)
    dismissed, outgoing = server.on_message(3, broken())
    assert (dismissed[0], Dismissal.from_message(dismissed[1]).steps) == (3, 1)
    assert shown([outgoing]) == [(5, Kind.REPORT, 1, None)]


def test_the_final_parameters_are_worker_0s_though_another_speaks_for_its_group() -> None:
    server = begun(pushes=1)
    server.on_loss(0)
    server.on_message(1, broken())
    server.on_message(1, PULL)
    server.on_message(0, RETURNS)
    server.on_message(1, broken(1))
    for speaker in (1, 2):
        server.on_message(speaker, push(1.0))
    assert server.on_message(0, Message(Kind.PULL, stop=True)) == []
    server.on_message(2, LEAVE)
    assert shown(server.on_message(1, LEAVE)) == [(0, Kind.PARAMETERS, 1, -2.0)]
    assert not server.done
    server.on_message(0, LEAVE)
    assert server.done


def test_a_group_that_nobody_is_left_of_is_lost() -> None:
    server = begun()
    server.on_message(0, LEAVE)
    server.on_message(0, Message(Kind.PULL, stop=True))
    assert server.on_loss(2) == []
    assert shown(server.on_loss(3)) == [(0, Kind.PARAMETERS, 0, 0.0)]


def test_a_group_whose_last_push_was_held_when_its_speaker_was_lost_is_waited_for_no_more() -> None:
    """The others of it need not speak once more: they are through, and worker 0 gets the final parameters."""
    server = GroupServer(
        [(0, 1), (2, 3)], Synchronous(), Handling(), ServerSetting(0, RoleAssignment(CAST.workers, (4,)))
    )
    server.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json()), step=1))
    server.on_message(0, Message(Kind.PARAMETERS, torch.zeros(1)))
    for speaker in (0, 2):
        server.on_message(speaker, PULL)
    assert server.on_message(2, push(1.0)) == []
    assert server.on_loss(2) == []
    assert shown(server.on_message(0, push(3.0))) == [(0, Kind.PARAMETERS, 1, -2.0)]
    ((to, dismissed),) = server.on_message(3, broken())
    assert (to, Dismissal.from_message(dismissed).steps) == (3, 1)
    server.on_message(0, LEAVE)
    assert shown(server.on_message(0, Message(Kind.PULL, stop=True))) == [(0, Kind.PARAMETERS, 1, -2.0)]


def test_of_rounds_steps_are_counted_and_odd_numbers_do_no_harm() -> None:
    server = GroupServer([(0, 1), (2, 3)], Asynchronous(), Handling(), ServerSetting(0, CAST), round_steps=4)
    server.on_message(0, Message(Kind.CONFIGURE, pack_json(PLAN.to_json()), step=3))
    server.on_message(0, Message(Kind.PARAMETERS, torch.zeros(1)))
    for speaker in (0, 2):
        server.on_message(speaker, PULL)
    server.on_message(2, push(1.0))
    assert server.steps == {0: 0, 1: 0, 2: 4, 3: 4}
    server.on_loss(3)
    for odd in (
        Message(Kind.BROKEN, version=9, step=-3, weight=float("nan")),
        Message(Kind.BROKEN, pack_json({})),
    ):
        with pytest.raises(RefusedMessage, match="a BROKEN message is no StepBroken"):
            server.on_message(2, odd)
    server.on_message(2, broken(steps=7, since=4))
    assert (server.stats().missed, server.absent[3]) == ([[3, 4, 7]], [[4, 4]])
