"""When buckets are used and ready."""

import pytest

from polyrhythm.strategies.bucket_scheduling import BucketTimes


class Clock:
    """Stands still until it is told."""

    time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


def test_times_count_from_the_first_and_leave_waiting_out():
    clock = Clock()
    times = BucketTimes(clock, 3)
    for start in (100.0, 200.0):
        clock.time = start
        times.begin()
        for bucket, computed_s, waited_s in ((2, 1.0, 5.0), (1, 2.0, 7.0), (0, 4.0, 1.0)):
            began = times.use(bucket)
            clock.sleep(waited_s)
            times.waited_since(began)
            clock.sleep(computed_s)
        assert times.use_s == pytest.approx([3.0, 1.0, 0.0])
        for bucket, computed_s in enumerate((2.0, 0.5, 0.25)):
            clock.sleep(computed_s)
            times.ready(bucket)
        assert times.ready_s == pytest.approx([0.0, 0.5, 0.75])
