import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.data.dealing import held_out


@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_the_parts_are_disjoint_cover_all_and_hold_a_fifth_of_every_class(labels):
    labels = torch.tensor(labels)
    train, test = held_out(labels)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))
    for label in range(6):
        members = int((labels == label).sum())
        tested = int((labels[test] == label).sum())
        assert tested == (max(1, round(members / 5)) if members > 1 else 0)


def test_the_part_is_always_the_same_and_mixed():
    labels = torch.zeros(1000, dtype=torch.int64)
    _, test = held_out(labels)
    assert torch.equal(test, held_out(labels)[1])
    assert test.float().mean().item() == pytest.approx(500, abs=60)
