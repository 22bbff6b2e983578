"""What is sent and what is kept, against the rule in plain Python."""

import pytest
import torch

from polyrhythm.strategies.parameter_server.gaia import Gaia, Significance, add_packet

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def unpacked(packet, like):
    found = torch.zeros_like(like)
    if packet is not None:
        add_packet(found, packet)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_each_number_is_sent_or_kept_by_the_rule_and_nothing_is_lost(dtype, share):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-8, 9, (500,), generator=generator).to(dtype)
    updates = torch.randint(-8, 9, (500,), generator=generator).to(dtype)
    kept = torch.rand(500, generator=generator) > share
    updates[kept] = 0  # so that more or fewer are significant
    unsent = Significance(values)
    unsent.add(updates)
    sent = unpacked(unsent.take(values, 0.5), values)
    for number in range(500):
        w, u = float(values[number]), float(updates[number])
        expected = (u, 0.0) if abs(u) > 0.5 * abs(w) else (0.0, u)
        assert (float(sent[number]), float(unsent.retained[number])) == expected
    assert torch.equal(sent + unsent.retained, updates)


def test_at_zero_every_change_is_significant_and_no_change_never_is():
    values = torch.tensor([0.0, 0.0, 5.0])
    unsent = Significance(values)
    unsent.add(torch.tensor([1e-30, 0.0, 0.0]))
    assert unpacked(unsent.take(values, 0.9), values).tolist() == [pytest.approx(1e-30), 0.0, 0.0]
    assert unsent.take(values, 0.0) is None


def test_what_is_kept_adds_up_until_it_is_significant():
    values = torch.full((4,), 8.0)
    unsent = Significance(values)
    for _ in range(3):
        unsent.add(torch.tensor([1.0, 0.0, 0.5, -1.0]))
        packets = [unsent.take(values, 0.25)]
    assert unpacked(packets[-1], values).tolist() == [3.0, 0.0, 0.0, -3.0]
    assert unsent.retained.tolist() == [0.0, 0.0, 1.5, 0.0]
    assert unpacked(unsent.take_all(), values).tolist() == [0.0, 0.0, 1.5, 0.0]


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 3)])
def test_a_packet_is_as_short_as_it_can_be(dtype, each):
    values = torch.zeros(100, dtype=dtype)
    for count in (1, 20, 33, 50, 100):
        unsent = Significance(values)
        unsent.retained[:count] = 1
        assert len(unsent.take_all()) == min(100, each * count)


def test_the_threshold_shrinks_with_the_root_of_the_rounds():
    terms = Gaia(threshold=0.01, lag=0)
    assert [terms.threshold_of(number) for number in (1, 4, 25)] == [0.01, 0.005, 0.002]
