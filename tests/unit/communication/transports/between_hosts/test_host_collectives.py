"""Collectives over loopback, by threads that stand for members."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.transports.between_hosts.collectives import HostCollectives, Order
from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.errors import RunError
from unit.communication.transports.between_hosts.meshes import mesh, pair, together

LARGE = 700_001


def test_many_sums_of_all_sizes_at_once() -> None:
    counts = (3, LARGE, 1, 100_000, 9, 50_000)

    def play(member: int, collectives: HostCollectives) -> list[Tensor]:
        vectors = [torch.arange(count, dtype=torch.float64) * (member + 1) for count in counts]
        handles = [collectives.start_all_reduce(vector) for vector in vectors]
        for handle in reversed(handles):
            handle.wait()
        return vectors

    with mesh(3) as members:
        for vectors in together([partial(play, member, each) for member, each in enumerate(members)]):
            for vector, count in zip(vectors, counts, strict=True):
                assert torch.equal(vector, torch.arange(count, dtype=torch.float64) * 6)


def test_large_sums_go_on_while_a_member_does_something_else() -> None:
    """Member 0 starts and never waits; the others need its part."""
    vectors = [torch.ones(LARGE) for _ in range(3)]
    with mesh(3) as members:
        handle = members[0].start_all_reduce(vectors[0])
        assert (
            together([partial(members[other].all_reduce, vectors[other]) for other in (1, 2)]) == [None] * 2
        )
        assert torch.equal(vectors[1], torch.full((LARGE,), 3.0))
        handle.wait()
        assert torch.equal(vectors[0], vectors[1])


def test_a_small_sum_needs_no_other_thread() -> None:
    before = threading.active_count()
    seen: list[int] = []

    def play(collectives: HostCollectives) -> None:
        for _ in range(20):
            collectives.barrier()
        seen.append(threading.active_count())

    with mesh(2) as members:
        together([partial(play, each) for each in members])
    assert max(seen) <= before + 2


def test_who_starts_waits_for_no_thread_that_moves_bytes() -> None:
    vectors = [[torch.ones(count) for count in (3, LARGE, 5)] for _ in range(2)]
    handles: list[list[Order]] = [[], []]

    def start(member: int) -> None:
        handles[member] = [members[member].start_all_reduce(vector) for vector in vectors[member]]

    with mesh(2) as members:
        with members[0]._driving:  # as long as another thread does
            assert together([partial(start, 0)]) == [None]
            assert not any(handle.done() for handle in handles[0])
        start(1)
        for handle in [*handles[0], *handles[1]]:
            handle.wait()
        assert all(bool((vector == 2).all()) for vector in [*vectors[0], *vectors[1]])


def test_a_handle_that_is_asked_moves_bytes() -> None:
    vectors = [torch.ones(3), torch.ones(3)]
    with mesh(2) as members:
        both = zip(members, vectors, strict=True)
        handles: list[Order] = [each.start_all_reduce(vector) for each, vector in both]
        for handle in handles:
            while not handle.done():
                pass
            handle.wait()
    assert [vector.tolist() for vector in vectors] == [[2.0] * 3] * 2


def test_finish_is_called_once_and_what_is_no_vector_comes_back_in_its_place() -> None:
    called: list[int] = []
    square = [torch.arange(4.0).view(2, 2).t() for _ in range(2)]
    with mesh(2) as members:
        handles = [
            each.start_all_reduce(square[member], partial(called.append, member))
            for member, each in enumerate(members)
        ]
        for handle in [*handles, *handles]:
            handle.wait()
    assert called == [0, 1]
    assert [matrix.tolist() for matrix in square] == [[[0, 4], [2, 6]]] * 2


@pytest.mark.parametrize("count", [5, LARGE])
def test_who_has_done_its_part_may_leave(count: int) -> None:
    """A broadcast's root has left before the others come."""
    words = [torch.full((count,), float(member)) for member in range(3)]
    with mesh(3) as members:
        if count == 5:
            members[0].broadcast(words[0], 0)
            members[0].close()
        else:  # what does not fit into the connections leaves while the others take it
            threading.Thread(target=lambda: (members[0].broadcast(words[0], 0), members[0].close())).start()
        assert (
            together([partial(members[other].broadcast, words[other], 0) for other in (1, 2)]) == [None] * 2
        )
    assert all(torch.equal(word, words[0]) for word in words)


@pytest.mark.parametrize("count", [5, LARGE])
def test_a_member_that_is_gone_breaks_it_on_all(count: int) -> None:
    with mesh(4) as members:
        waiting = [each.start_all_reduce(torch.ones(count)) for each in members[1:]]
        members[0].close()
        for error in together([handle.wait for handle in waiting]):
            assert isinstance(error, CollectiveBroken)
        for each in members[1:]:
            with pytest.raises(
                CollectiveBroken, match=r"a collective broke, so a rank is gone: rank 1[0-3] is gone"
            ):
                each.all_reduce(torch.ones(1))


def test_the_one_who_is_gone_is_named() -> None:
    with mesh(2) as members:
        members[1].close()
        with pytest.raises(CollectiveBroken) as broken:
            members[0].all_reduce(torch.ones(1))
        assert broken.value.rank == 11


def test_giving_up_ends_the_waiting_of_all_and_nothing_touches_the_vectors_any_more() -> None:
    """The others wait for member 0, who is there and says nothing."""
    vectors = [torch.ones(LARGE) for _ in range(3)]
    with mesh(3) as members:
        handles = [members[other].start_all_reduce(vectors[other]) for other in (1, 2)]
        thread = threading.Thread(target=members[1].give_up, args=(CollectiveBroken("told to", 7),))
        thread.start()
        errors = together([handle.wait for handle in handles])
        thread.join()
        assert all(isinstance(error, CollectiveBroken) for error in errors)
        assert (errors[0].reason, errors[0].rank) == ("told to", 7)
        kept = vectors[1].clone()
        with pytest.raises(CollectiveBroken):
            members[0].all_reduce(vectors[0])
        assert torch.equal(vectors[1], kept)


def test_members_that_disagree_are_told() -> None:
    with mesh(2) as members:
        errors = together(
            [partial(each.all_reduce, torch.ones(3 + member)) for member, each in enumerate(members)]
        )
        assert any(isinstance(error, RunError) and "one size and dtype" in str(error) for error in errors)
        assert all(isinstance(error, RunError) for error in errors)


def test_bytes_that_are_no_frames_break_the_collective() -> None:
    near, far = pair()
    collectives = HostCollectives(0, (0, 1), {1: near})
    far.sendall(bytes(100))
    with pytest.raises(RunError, match="no part of one"):
        collectives.all_reduce(torch.ones(1))
    collectives.close()
    far.close()
