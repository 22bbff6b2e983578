"""The gates' decisions, one by one."""

import pytest

from polyrhythm.specs import choices
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.backup import Backup
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.gate import Decision
from polyrhythm.strategies.parameter_server.serving.served import CONSISTENCIES


def test_the_folder_is_the_list():
    assert choices(CONSISTENCIES) == {
        "asynchronous": Asynchronous,
        "backup": Backup,
        "bounded_staleness": BoundedStaleness,
        "softsync": Softsync,
        "synchronous": Synchronous,
    }


def test_synchronous_holds_all_until_the_last_and_starts_anew():
    gate = Synchronous().gate(3)
    everyone = Decision(apply=(0, 1, 2), answer=(0, 1, 2))
    assert [gate.arrive(pusher, 0) for pusher in (2, 0, 1)] == [Decision(), Decision(), everyone]
    assert [gate.arrive(pusher, 1) for pusher in (0, 1, 2)] == [Decision(), Decision(), everyone]


def test_synchronous_goes_on_without_those_who_left():
    gate = Synchronous().gate(3)
    assert gate.arrive(2, 0) == Decision()
    assert gate.leave(0) == Decision()
    assert gate.leave(1) == Decision(apply=(2,), answer=(2,))
    assert gate.leave(2) == Decision()


def test_synchronous_of_one():
    assert Synchronous().gate(1).arrive(0, 5) == Decision(apply=(0,), answer=(0,))


def test_asynchronous_lets_everything_through():
    gate = Asynchronous().gate(3)
    for pusher in (1, 1, 0, 2):
        assert gate.arrive(pusher, 0) == Decision(apply=(pusher,), answer=(pusher,))
    assert gate.leave(1) == Decision()


@pytest.mark.parametrize("consistency", [Asynchronous(), Synchronous()], ids=str)
def test_state_is_empty_between_steps(consistency):
    gate = consistency.gate(2)
    assert gate.state() == {}
    gate.load_state({})
    assert gate.arrive(0, 3).answer == ((0,) if not consistency.in_step() else ())


def test_who_goes_in_step():
    assert Synchronous().in_step() is True
    assert Asynchronous().in_step() is False
