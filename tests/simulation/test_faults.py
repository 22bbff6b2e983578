"""Every kind of fault, with times by hand.

Links take 0.5 s and 1000 bytes/s. A message without a tensor has 64 bytes, and those of `_say` have 72.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import Deadlock, VirtualTime
from polyrhythm.errors import PeerLost, RequestError, RunError
from polyrhythm.roles.world import StopRequest, World
from polyrhythm.simulation.fault_injector import FaultInjector
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.simulated_run import RankProgram, SimulatedRun
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import RoleAssignment

ALPHA_S, BANDWIDTH = 0.5, 1000.0
Part = Callable[[World], None]
Heard = list[tuple[float, Any]]


def _scene(faults: str, parts: dict[int, list[Part]], *, seed: int = 0, hosts: Any = None) -> FaultInjector:
    """Makes a scene of workers 0 to 2 and server 3; each rank plays its first part, and a successor the next."""
    time = VirtualTime()
    left = {rank: list(entries) for rank, entries in parts.items()}

    def role(world: World) -> None:
        entries = left.get(world.network.rank, [])
        if entries:
            entries.pop(0)(world)

    network = ConstantNetwork(time, ALPHA_S, BANDWIDTH)
    stage = SimulatedRun(
        time,
        network,
        RoleAssignment((0, 1, 2), (3,)),
        RankProgram(role),
        lambda rank: lambda: 1.0,
        StopRequest(),
        lambda event: None,
    )
    return FaultInjector(stage, ParameterServer(), parse_faults(faults), seed=seed, host_of=hosts)


def _say(*times_s: float, to: int = 3) -> Part:
    """Sends at these times; each message's version is its number."""

    def part(world: World) -> None:
        for number, time_s in enumerate(times_s):
            world.clock.sleep(time_s - world.clock.now())
            world.network.send(to, Message(Kind.PUSH, torch.tensor([1.0, 2.0]), version=number))

    return part


def _listen(heard: Heard, count: int, source: int | None = 1) -> Part:
    """Notes when which version, or which loss, is heard."""

    def part(world: World) -> None:
        for _ in range(count):
            try:
                _, message = world.network.receive(source)
                heard.append((round(world.clock.now(), 6), message.version))
            except PeerLost as loss:
                heard.append((round(world.clock.now(), 6), f"lost {loss.rank}"))

    return part


def _steps(count: int, done: list[float]) -> Part:
    def part(world: World) -> None:
        for _ in range(count):
            world.pace.forward((1.0,), lambda bucket: None)
            world.pace.backward((1.0,), lambda bucket: None)
            done.append(round(world.clock.now(), 6))

    return part


def _there(time_s: float, nbytes: int = 72) -> float:
    """When a message that starts now is there."""
    return round(time_s + nbytes / BANDWIDTH + ALPHA_S, 6)


def test_a_delayed_message_holds_up_what_follows_it() -> None:
    heard: Heard = []
    _scene("delay(seconds=2, count=1)", {1: [_say(1.0, 2.0, 4.0)], 3: [_listen(heard, 3)]}).play()
    late = _there(3.0)
    assert heard == [(late, 0), (late, 1), (_there(4.0), 2)]


def test_a_dropped_message_is_a_deadlock_that_names_everyone_who_waits() -> None:
    heard: Heard = []
    scene = _scene("drop(source=1, to=3, from_s=2, count=1)", {1: [_say(1.0, 2.0)], 3: [_listen(heard, 2)]})
    with pytest.raises(Deadlock, match="server 3 waits for a message from rank 1"):
        scene.play()
    assert heard == [(_there(1.0), 0)]
    assert scene.time.now() == pytest.approx(_there(2.0))


def test_a_doubled_message_arrives_twice_at_once() -> None:
    heard: Heard = []
    _scene("duplicate(to_s=1.5)", {1: [_say(1.0, 2.0)], 3: [_listen(heard, 3)]}).play()
    first, second = _there(1.0), _there(2.0)
    assert heard == [(first, 0), (first, 0), (second, 1)]


@pytest.mark.parametrize(
    "fault", ["cut(source=3, to=1, from_s=1.2, to_s=5)", "partition(groups=[[1]], from_s=1.2, to_s=5)"]
)
def test_a_cut_link_holds_its_messages_and_no_others(fault: str) -> None:
    heard: Heard = []
    others: Heard = []
    _scene(
        fault,
        {
            1: [_say(0.1, 1.0, 2.0, 6.0)],
            2: [_say(2.0, to=0)],
            0: [_listen(others, 1, 2)],
            3: [_listen(heard, 4)],
        },
    ).play()
    back = 5 + ALPHA_S
    assert heard == [(_there(0.1), 0), (back, 1), (back, 2), (_there(6.0), 3)]
    assert others == [(_there(2.0), 0)]


def test_a_cut_that_lasts_too_long_breaks_the_link_for_both_ends() -> None:
    heard: Heard = []
    back: Heard = []

    def both(world: World) -> None:
        _say(1.0)(world)
        _listen(back, 1, 3)(world)

    scene = _scene(
        "cut(source=1, to=3, from_s=1.2, to_s=9, broken_after_s=2)",
        {1: [both], 3: [_listen(heard, 1)]},
    )
    scene.play()
    assert heard == [(3.2, "lost 1")]
    assert back == [(3.2, "lost 3")]


def test_a_corrupt_payload_differs_in_one_bit() -> None:
    got: list[torch.Tensor] = []

    def listen(world: World) -> None:
        for _ in range(3):
            message = world.network.receive(1)[1]
            assert message.tensor is not None
            got.append(message.tensor)

    _scene("corrupt(count=1)", {1: [_say(1.0, 2.0, 3.0)], 3: [listen]}).play()
    sent = torch.tensor([1.0, 2.0]).view(torch.uint8)
    wrong = [int(value).bit_count() for value in got[0].view(torch.uint8) ^ sent]
    assert sum(wrong) == 1
    assert all(torch.equal(tensor, torch.tensor([1.0, 2.0])) for tensor in got[1:])


def test_a_corrupt_header_breaks_the_link_or_changes_a_number() -> None:
    outcomes = set()
    for seed in range(40):
        heard: Heard = []
        scene = _scene("corrupt(part=header, count=1)", {1: [_say(1.0)], 3: [_listen(heard, 1)]}, seed=seed)
        try:
            scene.play()
            outcomes.add("lost" if heard[0][1] == "lost 1" else "read" if heard[0][1] == 0 else "changed")
        except Deadlock:  # the context or the tag is another: nobody waits for such a message
            outcomes.add("unheard")
    assert outcomes == {"lost", "read", "changed", "unheard"}


def test_a_slow_workers_steps_are_longer_while_it_lasts() -> None:
    done: list[float] = []
    other: list[float] = []
    _scene("slow(rank=1, factor=3, from_s=1, to_s=2)", {1: [_steps(4, done)], 2: [_steps(2, other)]}).play()
    assert done == [1.0, 4.0, 5.0, 6.0]
    assert other == [1.0, 2.0]


def test_a_killed_rank_is_heard_of_behind_what_had_left() -> None:
    heard: Heard = []
    _scene("kill(rank=1, at_s=2.03)", {1: [_say(1.0, 1.95, 2.0, 3.0)], 3: [_listen(heard, 3)]}).play()
    assert heard == [  # what leaves from 2.0 on is cut in the middle
        (_there(1.0), 0),
        (_there(1.95), 1),
        (2.03 + ALPHA_S, "lost 1"),
    ]


def test_a_successor_is_another_rank_with_links_of_its_own() -> None:
    heard: Heard = []
    first: Heard = []
    second: Heard = []

    def server(world: World) -> None:
        for time_s, version in ((0.0, 1), (2.3, 7)):  # when the second leaves, its receiver is dead since 2
            world.clock.sleep(time_s - world.clock.now())
            world.network.send(1, Message(Kind.PARAMETERS, version=version))
        _listen(heard, 2, None)(world)
        world.network.send(1, Message(Kind.PARAMETERS, version=8))

    def successor(world: World) -> None:
        _say(4.0)(world)
        _listen(second, 1, 3)(world)

    _scene(
        "kill(rank=1, at_s=2, restart_after_s=0.1)",
        {0: [_steps(9, [])], 1: [_listen(first, 2, 3), successor], 3: [server]},
    ).play()
    there = _there(4.0)
    assert first == [(_there(0.0, 64), 1)]
    assert heard == [(2.5, "lost 1"), (there, 0)]
    assert second == [(_there(there, 64), 8)]  # 7 reached nobody


def test_nobody_opens_a_link_to_a_dead_rank() -> None:
    def server(world: World) -> None:
        world.clock.sleep(2.1)
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            world.network.send(1, Message(Kind.PULL))

    _scene("kill(rank=1, at_s=2)", {1: [_steps(9, [])], 3: [server]}).play()


def test_a_rank_is_killed_after_a_step_and_its_successor_counts_on() -> None:
    done: list[float] = []
    _scene(
        "kill(rank=1, after_step=2, restart_after_s=0.5); kill(rank=1, after_step=4)",
        {0: [_steps(9, [])], 1: [_steps(9, done), _steps(9, done)]},
    ).play()
    assert done == [1.0, 2.0, 3.5]  # the third step was begun and lost, the fourth is the successor's first


def test_a_host_takes_its_ranks_along() -> None:
    done: list[float] = []
    other: list[float] = []
    scene = _scene(
        "kill(host=7, at_s=1.5)",
        {1: [_steps(3, done)], 2: [_steps(3, done)], 0: [_steps(3, other)]},
        hosts=(5, 7, 7, 6),
    )
    scene.play()
    assert done == [1.0, 1.0]
    assert other == [1.0, 2.0, 3.0]
    assert scene.killed_at_s == {1: 1.5, 2: 1.5}


def test_random_kills_come_as_often_as_asked_and_never_to_the_leader() -> None:
    deaths = 0
    for seed in range(20):
        scene = _scene(
            "kill(rank=any, every_s=5, restart_after_s=0.1)",
            {0: [_steps(100, [])], 1: [_steps(100, [])] * 99, 2: [_steps(100, [])] * 99},
            seed=seed,
        )
        kill, killed = scene.kill, []
        scene.kill = lambda rank, kill=kill, killed=killed: (killed.append(rank), kill(rank))  # type: ignore[method-assign]
        scene.play()
        deaths += len(killed)
        assert set(killed) <= {1, 2}
    assert deaths > 20 * 100 / 5 * 0.8


def test_the_loss_of_who_is_needed_is_the_cause_that_is_named() -> None:
    heard: Heard = []

    def worker(world: World) -> None:
        world.network.receive(3)

    scene = _scene("kill(rank=3, at_s=2)", {0: [worker], 3: [_listen(heard, 1)]})
    with pytest.raises(RunError, match="server 3 was killed at 2 s, and the run needs it: rank 3 is gone"):
        scene.play()


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        ("kill(rank=4, at_s=1)", r"there is no rank 4; ranks are 0 to 3"),
        ("kill(host=9, at_s=1)", "no rank is on host 9"),
        ("kill(rank=1)", "give one of at_s, after_step and every_s"),
        ("kill(rank=1, at_s=1, every_s=2)", "give one of at_s, after_step and every_s"),
        ("kill(at_s=1)", "give either rank or host"),
        ("kill(rank=any, after_step=1)", "after_step needs the number of one rank"),
        ("kill(rank=3, after_step=1)", "is a server, which takes no steps"),
        ("kill(rank=every, at_s=1)", "rank should be a whole number"),
        ("slow(rank=3, factor=2)", "is a server"),
        ("slow(rank=1, factor=2, from_s=3, to_s=2)", "must be later"),
        ("drop(probability=2)", "probability should be less than or equal to 1"),
        ("drop(source=1, to=1)", "the same rank"),
        ("partition(groups=[[0, 1], [1]])", "a rank is in two groups"),
        ("partition(groups=[[0, 9]])", "there is no rank 9"),
        ("explode(rank=1)", "unknown fault 'explode'"),
        ("kill(rang=1)", "did you mean rank"),
    ],
)
def test_what_names_nothing_is_refused(faults: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        _scene(faults, {})


def test_faults_read_back_as_they_are_written() -> None:
    text = "kill(rank=any, every_s=5.0, restart_after_s=1.0); partition(groups=[[0, 1], [2]], to_s=3.0)"
    faults = parse_faults(text)
    assert parse_faults("; ".join(map(str, faults))) == faults
    assert parse_faults(["kill(rank=any, every_s=5, restart_after_s=1)", faults[1]]) == faults
