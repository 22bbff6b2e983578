"""A wish to stop reaches all_peers before the step that it names, on every graph."""

from __future__ import annotations

from random import Random

import pytest

from polyrhythm.communication.message import Kind, Message
from polyrhythm.specs import build
from polyrhythm.strategies.gossip.mixing.turns import Ending
from polyrhythm.strategies.topology import TOPOLOGIES, Topology

STEPS = 60


def stopped_at(topology: Topology, peers: int, wishes: dict[int, int], delay: int) -> list[int]:
    """Plays the words of the end alone; gives the step after which each worker stops.

    Args:
        topology: who hears whom.
        peers: how many there are.
        wishes: of workers, by the step at which they wish.
        delay: 1 if messages are heard a step later, before the next is sent.
    """
    endings = [Ending(lambda: topology.turns_to_all(peers) + delay) for _ in range(peers)]
    sent: list[list[Message]] = []

    def hear(step: int) -> None:
        for worker, ending in enumerate(endings):
            for source in topology.sources(worker, peers, step % topology.period(peers)):
                ending.record(sent[step][source])

    for step in range(STEPS):
        for worker in (worker for worker, at in wishes.items() if at == step):
            endings[worker].request_stop(step)
        if delay and step:
            hear(step - 1)
        sent.append([ending.mark(Message(Kind.VECTOR, step=step)) for ending in endings])
        if not delay:
            hear(step)
        if any(ending.after(step) for ending in endings):
            return [step if ending.after(step) else -1 for ending in endings]
    raise AssertionError("nobody stopped")


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "spec", ["ring", "star", "complete", "one_peer_exponential", "exponential", "random_regular"]
)
def test_all_stop_after_the_same_step(spec: str, delay: int) -> None:
    topology = build("topology", spec, TOPOLOGIES)
    assert isinstance(topology, Topology)
    random = Random(spec)
    for _ in range(20):
        peers = random.choice([4, 6, 8, 10])
        wishes = {
            worker: random.randrange(12) for worker in random.sample(range(peers), random.randint(1, peers))
        }
        found = stopped_at(topology, peers, wishes, delay)
        assert len(set(found)) == 1, (peers, wishes, found)
        first = min(wishes.values())
        assert first <= found[0] == first + topology.turns_to_all(peers) + delay - 1


def test_alone_it_stops_after_the_step_of_the_wish() -> None:
    ending = Ending(lambda: 0)
    assert not ending.after(3)
    ending.request_stop(4)
    assert not ending.after(3)
    assert ending.after(4)


def test_a_message_without_a_wish_says_nothing_of_the_end() -> None:
    ending = Ending(lambda: 1)
    message = Message(Kind.VECTOR, step=3)
    assert ending.mark(message) is message
    ending.record(message)
    assert not ending.after(100)
