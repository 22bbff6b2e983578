"""Batches that grow, in place of a learning rate that falls."""

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.roles.job import Calendar
from polyrhythm.specs import build

BATCHES, RATES = "polyrhythm.training.batch_schedules", "polyrhythm.training.schedules"


def factors(spec, epochs):
    schedule = build("batch schedule", spec, BATCHES)
    return [schedule.factor(epoch, epochs) for epoch in range(epochs)]


@pytest.mark.parametrize(
    ("spec", "epochs", "expected"),
    [
        ("constant", 3, [1, 1, 1]),
        ("step", 4, [1, 1, 2, 4]),
        ("step(at=[0.25, 0.5], growth=3)", 8, [1, 1, 3, 3, 9, 9, 9, 9]),
        ("step(at=[0.5])", 5, [1, 1, 1, 2, 2]),  # half of five epochs is over when the fourth begins
        ("step(at=[0.9], growth=10)", 2, [1, 1]),
    ],
)
def test_by_hand(spec, epochs, expected):
    assert factors(spec, epochs) == expected


@pytest.mark.parametrize(
    "rate", ["constant", "cosine", "linear(warmup_epochs=1)", "cosine(reference_batch=16)"]
)
def test_the_rate_of_an_epoch_does_not_depend_on_the_batch(rate):
    schedule = build("schedule", rate, RATES)
    alike, growing = (Calendar(96, 2, sizes) for sizes in ((4,) * 4, (4, 8, 12, 24)))
    for epoch in range(4):
        for share in (0, 1 / 2):
            steps = [
                calendar.start(epoch) + int(share * (calendar.start(epoch + 1) - calendar.start(epoch)))
                for calendar in (alike, growing)
            ]
            plain, grown = (
                schedule.factor(step, calendar.length)
                for step, calendar in zip(steps, (alike, growing), strict=True)
            )
            assert grown == pytest.approx(plain, rel=1e-12)


def test_a_growing_batch_does_to_the_quotient_what_a_falling_rate_does():
    growing = build("batch schedule", "step(at=[0.5, 0.75], growth=10)", BATCHES)
    falling = build("schedule", "step(at=[0.5, 0.75], gamma=0.1)", RATES)
    calendar = Calendar(64, 1, (4,) * 8)
    for epoch in range(8):
        by_rate = falling.factor(calendar.start(epoch), calendar.length) / 4
        assert 1 / (4 * growing.factor(epoch, 8)) == pytest.approx(by_rate, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("step(growth=1)", "growth should be greater than or equal to 2"),
        ("step(at=[])", "at"),
        ("step(at=[1.5])", "less than 1"),
        ("setp", "unknown batch schedule 'setp'"),
    ],
)
def test_what_cannot_be_is_refused(spec, words):
    with pytest.raises(RequestError, match=words):
        build("batch schedule", spec, BATCHES)
