import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.data.dealing import BY_COUNT, Sides, held_out, held_out_by_name


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


def sides(names, labels, before=None):
    train, test = held_out_by_name(names, torch.tensor(labels), before)
    return Sides(frozenset(names[i] for i in train.tolist()), frozenset(names[i] for i in test.tolist()))


def folder(*sizes, first=0):
    """Names and labels of images in one folder a class."""
    found = [
        (f"{label}/{number}.png", label)
        for label, n in enumerate(sizes)
        for number in range(first, first + n)
    ]
    return [name for name, _ in found], [label for _, label in found]


def test_a_fifth_of_every_class_is_held_out_by_name():
    found = sides(*folder(1, 2, 10, 57))
    held = [sum(name.startswith(f"{label}/") for name in found.held_out) for label in range(4)]
    assert held == [0, 1, 2, 11]
    # The order in which images are listed changes nothing.
    names, labels = folder(1, 2, 10, 57)
    assert sides(names[::-1], labels[::-1]) == found


@given(
    kept=st.lists(st.booleans(), min_size=30, max_size=30),
    added=st.lists(st.integers(30, 60), max_size=20, unique=True),
)
def test_no_image_changes_its_side_and_new_ones_are_dealt_by_their_own_name(kept, added):
    names, labels = folder(10, 12, 8)
    before = sides(names, labels)
    rest = [(name, label) for name, label, stays in zip(names, labels, kept, strict=True) if stays]
    new = [(f"{number % 3}/{number}.png", number % 3) for number in added]
    entries = rest + new
    now = sides([name for name, _ in entries], [label for _, label in entries], before)
    assert not now.held_out & before.trained
    for label in range(3):
        own = [name for name, each in entries if each == label]
        held = now.held_out.intersection(own)
        if len(own) > 1 and not set(own) <= before.trained:
            assert 0 < len(held) < len(own)
        old = before.held_out.intersection(own)
        assert len(old - now.held_out) <= (not before.trained.intersection(own))
    # Dealt again with what is known now, nothing moves.
    assert sides([name for name, _ in entries], [label for _, label in entries], now) == now


def test_an_image_keeps_its_side_in_another_folder_of_its_class_or_of_another():
    names, labels = folder(20)
    before = sides(names, labels)
    moved = [f"other/{name.rpartition('/')[2]}" for name in names]
    now = sides(moved, labels, before)
    assert {name.rpartition("/")[2] for name in now.held_out} == {
        name.rpartition("/")[2] for name in before.held_out
    }


def test_runs_without_a_record_are_dealt_by_count():
    names, labels = folder(20, 30)
    wanted = held_out(torch.tensor(labels))
    found = held_out_by_name(names, torch.tensor(labels), BY_COUNT)
    assert all(map(torch.equal, found, wanted))
