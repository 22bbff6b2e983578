"""A worker's own book-keeping."""

import pytest

from polyrhythm.roles.step_metrics import REPORT_EVERY_S, Tally


class Clock:
    """A clock that is set by hand."""

    def __init__(self, time_s=0.0):
        self.time_s = time_s

    def now(self):
        return self.time_s


def test_losses_are_means_over_images_and_start_anew_at_every_event():
    clock = Clock(100.0)
    tally = Tally(2, clock)
    tally.begin()
    tally.begin_epoch()
    tally.add(4, 1.0, 0.25)
    tally.add(2, 4.0, 0.5)
    clock.time_s = 101.0
    event = tally.say(0, 2, 0.1)
    assert (event.worker, event.epoch, event.step, event.steps, event.images) == (2, 0, 2, 2, 6)
    assert event.loss == pytest.approx((4 * 1.0 + 2 * 4.0) / 6)
    assert (event.wait_s, event.learning_rate, event.time_s) == (0.75, 0.1, 1.0)
    tally.add(4, 3.0, 0.0)
    again = tally.say(0, 3, 0.05)
    assert (again.steps, again.images, again.loss, again.wait_s) == (1, 4, 3.0, 0.0)


def test_the_epochs_loss_starts_anew_and_the_images_go_on():
    tally = Tally(0, Clock())
    tally.begin_epoch()
    tally.add(4, 1.0, 0.0)
    tally.begin_epoch()
    tally.add(2, 3.0, 0.0)
    assert (tally.epoch_images, tally.epoch_loss, tally.images) == (2, 6.0, 6)


def test_an_empty_batch_adds_a_step_and_no_loss():
    tally = Tally(0, Clock())
    tally.add(0, 0.0, 0.0)
    event = tally.say(0, 1, 0.1)
    assert (event.steps, event.images, event.loss) == (1, 0, 0.0)


def test_it_is_time_to_speak_now_and_then():
    clock = Clock(5.0)
    tally = Tally(0, clock)
    tally.begin()
    assert not tally.due
    clock.time_s = 5.0 + REPORT_EVERY_S
    assert tally.due
    tally.say(0, 0, 0.1)
    assert not tally.due


def test_who_waits_for_others_does_not_wait_for_the_processor_meanwhile():
    """Of 10 s, 6 in an exchange: on a busy machine most of what the system counts is of a thread that looks on."""
    clock, processor = Clock(), {"waited": 2.0, "used": 1.0}
    tally = Tally(0, clock, lambda: processor["waited"], lambda: processor["used"])
    tally.begin()
    clock.time_s, processor["waited"], processor["used"] = 10.0, 2.0 + 5.5, 1.0 + 3.5
    tally.add(4, 1.0, 6.0, used_waiting_s=0.5)
    event = tally.say(0, 1, 0.1)
    assert event.processor_s == pytest.approx(1.0)  # 4 s of working, of which it had a processor for 3
    clock.time_s, processor["waited"], processor["used"] = 20.0, 8.0, 14.0
    tally.add(4, 1.0, 0.0)
    assert tally.say(0, 2, 0.1).processor_s == pytest.approx(0.5)  # as the system says
    clock.time_s = 21.0
    tally.add(4, 1.0, 1.0)
    assert tally.say(0, 3, 0.1).processor_s == 0.0
