"""The size of training pictures over the epochs."""

from __future__ import annotations

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.training.size_schedules.constant import Constant
from polyrhythm.training.size_schedules.progressive import Progressive

SIZES = "polyrhythm.training.size_schedules"


def test_sizes_grow_at_their_shares_of_the_run() -> None:
    schedule = Progressive(sizes=(128, 160), until=(0.4, 0.7))
    assert [schedule.side(epoch, 10, 224) for epoch in range(10)] == [128] * 4 + [160] * 3 + [224] * 3


def test_a_short_run_may_leave_a_size_out() -> None:
    assert [Progressive().side(epoch, 2, 224) for epoch in range(2)] == [128, 160]


def test_constant_is_the_image_size() -> None:
    assert Constant().side(3, 10, 96) == 96


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("progressive(sizes=[32], until=[0.4, 0.7])", "1 sizes need as many ends in until, not 2"),
        ("progressive(sizes=[32, 48], until=[0.7, 0.4])", "until must rise"),
        ("progressive(sizes=[0], until=[0.5])", "greater than or equal to 1"),
        ("progressive(sizes=[], until=[])", "at least 1 item"),
        ("growing", "unknown size schedule 'growing'"),
    ],
)
def test_wrong_schedules_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        build("size schedule", text, SIZES)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_size_beyond_that_of_the_pictures_is_refused() -> None:
    with pytest.raises(RequestError, match="160 pixels are more than the 64 of the image size"):
        Progressive().side(0, 10, 64)
