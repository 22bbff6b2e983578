from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import running
from polyrhythm.simulation.timeline import ObservedNetwork, ObservedTime, Sending, Span, Timeline


def played() -> Timeline:
    """Rank 0 computes for 2 s in two pieces, sends 512 bytes at 256 bytes/s, and waits for them to leave."""
    timeline = Timeline()
    time = ObservedTime(timeline)
    network = ObservedNetwork(ConstantNetwork(time, 0.5, 256.0), time, timeline)

    def rank() -> None:
        time.sleep(0.5)
        time.sleep(1.5)
        task = running()
        network.transfer(0, 1, 512, lambda: time.wake(task), lambda: None)
        time.park("a message to leave")
        time.sleep(1.0)

    time.ranks[time.spawn("worker 0", rank)] = 0
    time.spawn("rank 0's background work", lambda: time.sleep(9.0))
    time.run()
    return timeline


def test_computing_waiting_and_sending_are_noted() -> None:
    timeline = played()
    assert timeline.spans == [
        Span(0, "compute", 0.0, 2.0),
        Span(0, "wait", 2.0, 4.0, "a message to leave"),
        Span(0, "compute", 4.0, 5.0),
    ]
    assert timeline.sendings == [Sending(0, 1, 512, 2.0, 4.0)]


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    played().write(path, {0: "worker 0", 1: "server 0"}, {0: (0, "here"), 1: (3, "there")})
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "here",
        "there",
        "worker 0",
        "server 0",
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("compute", 0.0, 2e6),
        ("wait", 2e6, 2e6),
        ("compute", 4e6, 1e6),
    ]
    begin, end = (next(event for event in events if event["ph"] == kind) for kind in "be")
    assert (begin["id"], begin["cat"], begin["name"]) == (end["id"], end["cat"], end["name"])
    assert begin["name"] == "send to server 0"
    assert (begin["ts"], end["ts"], begin["args"]) == (2e6, 4e6, {"bytes": 512})
    assert {event["pid"] for event in events if event.get("tid") == 1} == {3}


@pytest.mark.parametrize("second", [Span(0, "wait", 2.0, 3.0), Span(1, "compute", 2.0, 3.0)])
def test_only_the_same_rank_doing_the_same_goes_on(second: Span) -> None:
    timeline = Timeline()
    timeline.add(Span(0, "compute", 1.0, 2.0))
    timeline.add(second)
    assert len(timeline.spans) == 2
