from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyrhythm.communication.arrivals import Arrivals, check
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.forwarding import RecordingCommunicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import Deadlock, VirtualTime
from polyrhythm.simulation.replay import Performance, Script, ScriptedCommunicator, ScriptOver


def _push(sender: int, step: int) -> Message:
    return Message(Kind.PUSH, torch.full((3,), 10.0 * sender + step), step=step)


def _arrivals(*sources: int) -> Arrivals:
    """Records the messages of `_push`, each sender's steps counted from 0."""
    arrivals, steps = Arrivals(), dict.fromkeys(sources, 0)
    for source in sources:
        arrivals.note(source, _push(source, steps[source]))
        steps[source] += 1
    return arrivals


def _hear(script: Script, messages: int, performance: Performance | None = None) -> list[tuple[int, int]]:
    """Lets rank 0 hear messages of ranks 1 and 2, who send two each, rank 1 first; gives senders and steps."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 0.0, 1e30), 3)
    heard: list[tuple[int, int]] = []

    def listen() -> None:
        ranks = ScriptedCommunicator(cluster.communicator(0), script, performance or Performance())
        for _ in range(messages):
            source, message = ranks.receive()
            heard.append((source, message.step))

    def speak(rank: int) -> None:
        ranks = cluster.communicator(rank)
        ranks.clock.sleep(rank)
        for step in range(2):
            ranks.send(0, _push(rank, step))

    time.spawn("listener", listen)
    for rank in (1, 2):
        time.spawn(f"speaker {rank}", lambda rank=rank: speak(rank))  # type: ignore[misc]
    time.run()
    return heard


@pytest.mark.parametrize("order", [(1, 1, 2, 2), (2, 1, 2, 1), (2, 2, 1, 1)])
def test_a_rank_hears_whom_the_script_names_whoever_comes_first(order: tuple[int, ...]) -> None:
    script = Script(0, _arrivals(*order))
    steps = [order[:place].count(source) for place, source in enumerate(order)]
    assert _hear(script, 4) == list(zip(order, steps, strict=True))
    assert (script.played, script.left, script.difference) == (4, 0, None)


def test_a_source_that_never_sends_is_a_deadlock_that_names_it() -> None:
    with pytest.raises(Deadlock, match=r"^deadlock: listener waits for a message from rank 2$"):
        _hear(Script(0, _arrivals(1, 2, 2, 2)), 4)


def test_hearing_more_than_was_recorded_is_an_error() -> None:
    with pytest.raises(ScriptOver, match=r"^rank 0 waits for more than the 1 messages of the recording$"):
        _hear(Script(0, _arrivals(2)), 2)


def test_the_first_message_that_differs_is_noticed() -> None:
    recorded = _arrivals(2, 1, 2, 1)
    recorded.checks[1] ^= 1
    recorded.checks[3] ^= 1
    performance = Performance()
    _hear(Script(0, recorded), 4, performance)
    found = performance.difference
    assert found is not None
    assert (found.rank, found.message, found.source, found.kind, found.step) == (0, 1, 1, "PUSH", 0)
    assert found.text == "PUSH of step 0 from rank 1 is not the message that was recorded"


def test_a_recorder_notes_only_what_could_have_come_from_anyone() -> None:
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), 2)
    arrivals = Arrivals()
    recorded = RecordingCommunicator(cluster.communicator(0), arrivals)

    def speak() -> None:
        ranks = cluster.communicator(1)
        aside = ranks.subgroup("aside", [0, 1])
        for space, message in [
            *((ranks, _push(1, 0)), (ranks, Message(Kind.CHECKPOINT)), (aside, _push(1, 7))),
            *((ranks, _push(1, 1)), (ranks, _push(1, 2))),
        ]:
            space.send(0, message)

    def listen() -> None:
        assert recorded.receive()[1].step == 0
        assert recorded.receive()[1].kind is Kind.CHECKPOINT  # a replay asks for none
        assert recorded.receive(1)[1].step == 1
        assert recorded.receive()[1].step == 2
        assert recorded.subgroup("aside", [0, 1]).receive()[1].step == 7

    time.spawn("speaker", speak)
    time.spawn("listener", listen)
    time.run()
    assert list(arrivals.sources) == [1, 1]
    assert list(arrivals.checks) == [check(1, _push(1, 0)), check(1, _push(1, 2))]


def test_a_wrapper_is_a_communicator_in_every_respect() -> None:
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), 3)
    seen: list[Any] = []

    def play(rank: int) -> None:
        plain = cluster.communicator(rank)
        ranks: Communicator = RecordingCommunicator(plain, Arrivals())
        vector = torch.tensor([1.0, 2.0]) * (rank + 1)
        ranks.all_reduce(vector)
        again = vector.clone()
        ranks.start_all_reduce(again).wait()
        given = torch.tensor([float(rank)])
        ranks.broadcast(given, root=2)
        ranks.barrier()
        ranks.start_send((rank + 1) % 3, _push(rank, 5)).wait()
        ranks.clock.sleep(1.0)
        source, message = ranks.poll() or (None, None)
        work = ranks.start(lambda: "worked").wait()
        assert (ranks.rank, ranks.size, ranks.clock) == (rank, 3, time)
        assert ranks.traffic.bytes_sent == plain.traffic.bytes_sent > 0
        assert message is not None
        seen.append((vector.tolist(), again.tolist(), given.tolist(), source, message.step, work))

    for rank in range(3):
        time.spawn(f"rank {rank}", lambda rank=rank: play(rank))  # type: ignore[misc]
    time.run()
    assert sorted(seen, key=lambda entry: entry[3]) == [
        ([6.0, 12.0], [18.0, 36.0], [2.0], source, 5, "worked") for source in range(3)
    ]


FACTS: list[Callable[[], Message]] = [
    lambda: Message(Kind.PULL),
    lambda: Message(Kind.PUSH),
    lambda: Message(Kind.PULL, version=1),
    lambda: Message(Kind.PULL, step=1),
    lambda: Message(Kind.PULL, weight=0.5),
    lambda: Message(Kind.PULL, learning_rate=0.1),
    lambda: Message(Kind.PULL, stop=True),
    lambda: Message(Kind.PULL, torch.zeros(4)),
    lambda: Message(Kind.PULL, torch.full((4,), 2.0**-30)),
    lambda: Message(Kind.PULL, torch.zeros(4, dtype=torch.bfloat16)),
    lambda: Message(Kind.PULL, torch.zeros(0)),
]


def test_a_check_depends_on_every_fact() -> None:
    checks = {check(source, fact()) for fact in FACTS[:-1] for source in (0, 1)}
    assert len(checks) == 2 * len(FACTS[:-1])
    assert check(0, FACTS[-1]()) == check(0, FACTS[0]())  # nothing in it


def test_a_check_sees_a_last_bit_that_changed_everywhere() -> None:
    vector = torch.rand(100_000)
    nudged = torch.nextafter(vector, torch.ones(()))
    assert check(0, Message(Kind.PUSH, vector)) != check(0, Message(Kind.PUSH, nudged))


def test_arrivals_survive_as_text_and_are_small() -> None:
    arrivals = Arrivals()
    for number in range(10_000):
        arrivals.sources.append((number * 7) % 3 + 70_000)
        arrivals.checks.append(number % 65_536)
    text = arrivals.to_json()
    read = Arrivals.from_json(text)
    assert (read.sources, read.checks) == (arrivals.sources, arrivals.checks)
    assert len(text["sources"]) < 1_000


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"sources": 3, "checks": ""},
        {"sources": "no base 64!", "checks": ""},
        {"sources": "AAAA", "checks": "AAAA"},
        {**_arrivals(1, 2).to_json(), "checks": _arrivals(1).to_json()["checks"]},
        {**_arrivals(1, 2).to_json(), "sources": _arrivals(1, 2).to_json()["sources"][:12]},
    ],
)
def test_damaged_arrivals_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        Arrivals.from_json(value)
