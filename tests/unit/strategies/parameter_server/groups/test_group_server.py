"""The server of groups by hand-written messages: groups 0, 1 and 2, 3; servers 4 and 5."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.communication.control_message import MembershipView, StepBroken
from polyrhythm.communication.log import Report
from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.groups.group_server import GroupServer
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
