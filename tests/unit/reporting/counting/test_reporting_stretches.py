import math
from dataclasses import replace

import pytest

from polyrhythm.reporting.figures import Series, Stretch, grouped, mean_loss, merged

FIRST = Stretch(
    end_s=2.0,
    seconds=2.0,
    epoch=0,
    step=10,
    steps=10,
    images=300,
    images_seen=500,
    loss=1.0,
    learning_rate=0.1,
    wait_s=0.5,
)
SECOND = Stretch(
    end_s=5.0,
    seconds=3.0,
    epoch=1,
    step=15,
    steps=5,
    images=100,
    images_seen=800,
    loss=3.0,
    learning_rate=0.2,
    wait_s=1.5,
)


def test_merging_two_stretches_sums_what_adds_up_and_weighs_the_loss_by_images():
    assert merged(FIRST, SECOND) == Stretch(
        end_s=5.0,
        seconds=5.0,
        epoch=1,
        step=15,
        steps=15,
        images=400,
        images_seen=800,
        loss=1.5,  # (300 · 1 + 100 · 3) / 400
        learning_rate=0.2,
        wait_s=2.0,
    )
    assert merged(FIRST, SECOND).images_per_s == 80.0
    assert merged(FIRST, SECOND).waiting_share == 0.4


def test_a_stretch_without_time_or_images_has_no_rates():
    assert math.isnan(replace(FIRST, seconds=0.0).images_per_s)
    assert math.isnan(replace(FIRST, seconds=0.0).waiting_share)
    assert math.isnan(mean_loss([]))
    assert mean_loss([FIRST, replace(SECOND, images=0, loss=math.nan)]) == 1.0
    assert math.isnan(mean_loss([FIRST, replace(SECOND, loss=math.nan)]))


@pytest.mark.parametrize(("size", "images"), [(1, [1, 2, 3, 4, 5]), (2, [3, 7, 5]), (3, [6, 9]), (9, [15])])
def test_neighbors_are_grouped_and_the_last_group_may_be_smaller(size, images):
    stretches = [replace(FIRST, images=number) for number in range(1, 6)]
    assert [group.images for group in grouped(stretches, size)] == images


def test_a_series_stays_bounded_and_loses_nothing_but_detail():
    stretches = [
        replace(FIRST, end_s=float(i), images=i, loss=float(i % 7), wait_s=i / 8) for i in range(1, 1001)
    ]
    series = Series(stretches[0], limit=16)
    for stretch in stretches[1:]:
        series.add(stretch)
        assert len(series.stretches) <= 16
    assert series.last == stretches[-1]
    assert sum(part.images for part in series.stretches) == series.total.images == 500500
    assert series.total.wait_s == sum(stretch.wait_s for stretch in stretches)
    weighted = sum(stretch.loss * stretch.images for stretch in stretches) / 500500
    assert series.total.loss == pytest.approx(weighted, rel=1e-12)
    assert mean_loss(series.stretches) == pytest.approx(weighted, rel=1e-12)
    assert [part.end_s for part in series.stretches] == sorted(part.end_s for part in series.stretches)
