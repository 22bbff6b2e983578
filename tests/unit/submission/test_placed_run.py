"""A run whose ranks are placed one by one: who is started again, and with which status the job ends."""

import queue

import pytest

from polyrhythm.submission import placed_run
from polyrhythm.submission.placed_run import LOST, PlacedRun, variables


class Scripted:
    """A place where every start of a rank ends as the test has written."""

    def __init__(self, index, said, endings):
        self.name = f"host{index}"
        self._index, self.said, self._endings = index, said, endings
        self.started, self.signals = [], []

    def start(self, rank, environment, words):
        self.started.append(rank)
        ending = self._endings[rank].pop(0)
        if isinstance(ending, OSError):
            raise ending
        if ending == "gone":
            self.said.put((self._index, {"gone": "no route"}))
        elif ending is not None:
            self.said.put((self._index, {"rank": rank, "stream": 1, "line": f"I am {rank}"}))
            self.said.put((self._index, {"rank": rank, "status": ending}))

    def signal(self, number):
        self.signals.append(number)
        for rank in set(self.started):
            self.said.put((self._index, {"rank": rank, "status": 130}))

    def close(self):
        pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(placed_run, "_AGAIN_S", 0.0)
    monkeypatch.setattr(placed_run, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(placed_run, "_LEAVE_S", 0.5)


def carried_out(endings, placed=(0, 1), restarts=3):
    said, told, printed = queue.Queue(), [], []
    places = [Scripted(index, said, endings) for index in range(max(placed) + 1)]
    run = PlacedRun(
        places,
        placed,
        said,
        [["train"]] * len(placed),
        ("here", 1),
        restarts,
        lambda rank, stream, line: printed.append((rank, stream, line)),
        told.append,
    )
    return run, places, told, printed


def test_a_run_that_ends_well_ends_well():
    run, places, told, printed = carried_out({0: [0], 1: [0]})
    assert run.carry_out() == 0
    assert [place.started for place in places] == [[0], [1]]
    assert told == []
    assert (0, 1, "I am 0") in printed


def test_a_killed_rank_is_started_again_and_no_other():
    run, places, told, _ = carried_out({0: [None], 1: [-9, 0]})
    places[1].start_ = places[1].start

    def then_the_leader_ends(rank, environment, words):
        places[1].start_(rank, environment, words)
        if len(places[1].started) == 2:
            places[0].said.put((0, {"rank": 0, "status": 0}))

    places[1].start = then_the_leader_ends
    assert run.carry_out() == 0
    assert [place.started for place in places] == [[0], [1, 1]]
    assert told == ["rank 1 on host1 was killed by signal 9: it is started again"]


def test_restarts_are_counted_for_each_rank():
    run, places, _, _ = carried_out({0: [1, 1, 1], 1: [1, 1, 1]}, restarts=2)
    assert run.carry_out() == 1
    assert [len(place.started) for place in places] == [3, 3]


def test_without_its_leader_a_run_begins_again_with_those_that_had_given_up():
    run, places, _, _ = carried_out({0: [1, 0], 1: [1, 1, 0]}, restarts=1)
    assert run.carry_out() == 0
    assert places[0].started == [0, 0]
    assert len(places[1].started) >= 2


@pytest.mark.parametrize("status", [2, 75, 130])
def test_a_final_word_of_the_leader_is_the_jobs(status):
    run, places, _, _ = carried_out({0: [status], 1: [status]})
    assert run.carry_out() == status
    assert [len(place.started) for place in places] == [1, 1]


def test_the_ranks_of_a_lost_host_are_started_again_there():
    run, places, told, _ = carried_out({0: [0], 1: ["gone", OSError("no route to it"), 0]})
    places[0].start = lambda rank, environment, words: None
    again = places[1].start

    def then_the_leader_ends(rank, environment, words):
        again(rank, environment, words)
        places[1].said.put((0, {"rank": 0, "status": 0}))

    def third(rank, environment, words):
        (then_the_leader_ends if len(places[1].started) == 2 else again)(rank, environment, words)

    places[1].start = third
    assert run.carry_out() == 0
    assert places[1].started == [1, 1, 1]
    assert told == ["host1 is gone: no route", "host1 cannot be reached: no route to it"]
    assert LOST == 255


def test_a_request_to_stop_reaches_all_hosts():
    run, places, _, _ = carried_out({0: [None], 1: [None]})
    run.stop(15)
    run.stop(2)
    assert run.carry_out() == 130
    assert [place.signals for place in places] == [[15], [15]]


def test_ranks_that_do_not_leave_are_not_waited_for():
    run, _, _, _ = carried_out({0: [0], 1: [None]})
    assert run.carry_out() == 0


def test_the_variables_are_torchruns():
    told = variables(3, [0, 0, 1, 1, 2], ("10.0.0.1", 4711))
    assert {
        key: told[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    } == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.0.0.1", "4711")
