"""Pieces and their order."""

from itertools import permutations

import pytest

from polyrhythm.strategies.bucket_scheduling import Speed, cut, seconds, urgent_first
from polyrhythm.training.flat_parameters import Bucket

BUCKETS = [Bucket(20, 100, range(2, 3)), Bucket(10, 20, range(1, 2)), Bucket(0, 10, range(1))]


def test_what_is_used_sooner_overtakes_what_has_not_set_out():
    pieces = cut(BUCKETS, 20)  # four of bucket 0, of 20 numbers each, then buckets 1 and 2
    order = urgent_first(pieces, ready_s=[0, 3, 5], use_s=[9, 4, 0], speed=Speed(0, 0.1))
    # at 0 and 2 only bucket 0 is ready; at 4 bucket 1 is; at 5 bucket 2
    assert order == [0, 1, 4, 5, 2, 3]


def test_a_link_that_is_quicker_than_the_backward_pass_keeps_the_order():
    pieces = cut(BUCKETS, 20)
    assert urgent_first(pieces, [0, 3, 5], [9, 4, 0], Speed(0, 0.001)) == list(range(6))


def late_s(order, pieces, ready_s, use_s, speed):
    """When the next forward pass ends being late, by brute force: the most that any bucket's use has to wait."""
    now, there = 0.0, {}
    for number in order:
        piece = pieces[number]
        now = max(now, ready_s[piece.bucket]) + seconds(piece, speed)
        there[piece.bucket] = now
    return max(there[bucket] - use_s[bucket] for bucket in there)


@pytest.mark.parametrize("seconds_per_number", [0.01, 0.03, 0.1, 0.3, 1.0])
def test_no_other_order_of_ready_pieces_is_less_late_when_all_are_ready(seconds_per_number):
    pieces, use_s, speed = cut(BUCKETS, 40), [9, 4, 0], Speed(0.1, seconds_per_number)
    ready_s = [0.0, 0.0, 0.0]
    found = late_s(urgent_first(pieces, ready_s, use_s, speed), pieces, ready_s, use_s, speed)
    others = [(0, *rest) for rest in permutations(range(1, len(pieces)))]
    assert found == pytest.approx(min(late_s(order, pieces, ready_s, use_s, speed) for order in others))
