"""A worker's own book-keeping."""

import pytest

from polyrhythm.roles.step_metrics import ProcessorWait, Tally


class Clock:
    """A clock that is set by hand."""

    def __init__(self, time_s=0.0):
        self.time_s = time_s

    def now(self):
        return self.time_s


def test_waiting_for_the_processor_counts_outside_of_exchanges_only():
    """Of 10 s, 6 in an exchange, where a thread that looks for messages on a busy machine waits for a core as well."""
    clock, waited_s = Clock(), [2.0]
    tally = Tally(0, clock, lambda: waited_s[0])
    tally.begin()
    clock.time_s, waited_s[0] = 10.0, 2.0 + 5.5
    tally.add(4, 1.0, 6.0, queued_waiting_s=4.5)
    assert tally.report(0, 1, 0.1).processor_s == pytest.approx(1.0)
    clock.time_s, waited_s[0] = 20.0, 8.0
    tally.add(4, 1.0, 0.0)
    assert tally.report(0, 2, 0.1).processor_s == pytest.approx(0.5)
    clock.time_s = 21.0
    tally.add(4, 1.0, 1.0)
    assert tally.report(0, 3, 0.1).processor_s == 0.0


def test_the_system_counts_how_long_a_thread_waits_for_the_processor():
    wait = ProcessorWait()
    before_s = wait()
    assert 0 <= before_s <= wait()
    wait.close()
    assert wait() >= before_s


def test_what_exchanges_took_is_the_wait_of_steps_in_which_a_worker_was_last():
    """Of two workers each is last in half of the steps, whose waits of 1 s are the exchange itself."""
    tally = Tally(0, Clock(), last_of=2)
    for wait_s in (1.0, 5.0, 1.0, 3.0, 1.0, 4.0, 1.0, 6.0):
        tally.add(4, 1.0, wait_s)
    assert tally.report(0, 8, 0.1).exchange_s == pytest.approx(8.0)
    assert Tally(0, Clock()).report(0, 0, 0.1).exchange_s == 0.0


def test_exchanges_without_a_core_are_those_of_steps_in_which_a_worker_was_last():
    """In them it waited for a core for a quarter of the time; in the others without loss."""
    tally = Tally(0, Clock(), last_of=2)
    for wait_s, queued_s in ((1.0, 0.25), (5.0, 4.0), (1.0, 0.25), (3.0, 2.0)):
        tally.add(4, 1.0, wait_s, queued_waiting_s=queued_s)
    report = tally.report(0, 4, 0.1)
    assert (report.exchange_s, report.exchange_processor_s) == (pytest.approx(4.0), pytest.approx(1.0))
