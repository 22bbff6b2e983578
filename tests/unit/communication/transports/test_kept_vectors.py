"""Vectors that one process shares with itself: who comes later finds them through whoever is still there."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.communication.communicator import NoSharedMemory
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous
from polyrhythm.communication.transports.torch_distributed.shared_vectors import KeptVectors
from polyrhythm.errors import PeerLost

NUMBERS = torch.tensor([1.0, 2.0, 3.0])
MEMBERS = (0, 1, 2)


def own_memory_files() -> list[str]:
    """Names the files of memory that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    return [name for name in found if "memfd:polyrhythm" in name]


class Room:
    """A store, and the members who know it."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.gone: set[int] = set()
        self.losses: set[int] = set()
        self.members: list[KeptVectors] = []
        self.by_rank: dict[int, KeptVectors] = {}
        self.made: Tensor | Exception | None = None

    def member(self, rank: int, *, shares: bool = True) -> KeptVectors:
        rendezvous = Rendezvous(self.store, rank, len(MEMBERS), LOOPBACK)
        made = KeptVectors(rendezvous, shares, self.gone.__contains__, lambda rank: int(rank in self.losses))
        self.members.append(made)
        self.by_rank[rank] = made
        return made

    def first(self) -> Thread:
        """Lets the first member make the vector; it waits for the others."""
        made = Thread(target=self._make)
        made.start()
        return made

    def _make(self) -> None:
        try:
            self.made = self.member(0).get("w", MEMBERS, NUMBERS, later=False)
        except NoSharedMemory as error:
            self.made = error


@pytest.fixture
def room() -> Iterator[Room]:
    gc.collect()  # what other tests have left
    before = own_memory_files()
    made = Room()
    yield made
    for member in made.members:
        member.close()
    made.made = None
    gc.collect()
    assert own_memory_files() == before


def get(member: KeptVectors, *, later: bool = False) -> Tensor:
    return member.get("w", MEMBERS, torch.zeros(3), later=later)


def test_all_have_the_first_ones_numbers_in_the_same_memory(room: Room) -> None:
    making = room.first()
    one, two = get(room.member(1)), get(room.member(2))
    making.join()
    assert isinstance(room.made, Tensor)
    assert torch.equal(two, NUMBERS)
    one[1] = 7
    assert two.tolist() == room.made.tolist() == [1, 7, 3]


def test_who_comes_later_finds_it_through_whoever_is_left(room: Room) -> None:
    making = room.first()
    one, _ = get(room.member(1)), get(room.member(2))
    making.join()
    one[0] = 9
    first, second, third = (room.by_rank[rank] for rank in MEMBERS)
    first.close()
    third.close()
    heir = get(room.member(0), later=True)
    assert heir.tolist() == [9, 2, 3]
    second.close()  # the successor has it now
    assert get(room.member(1), later=True).data_ptr() != one.data_ptr()
    heir[2] = 5
    assert one.tolist() == [9, 2, 5]


def test_nobody_waits_for_a_member_that_is_lost(room: Room) -> None:
    room.losses.add(2)
    making = room.first()
    get(room.member(1))
    making.join()
    assert isinstance(room.made, Tensor)


def test_a_first_member_that_comes_later_and_finds_nobody_is_an_error(room: Room) -> None:
    making = room.first()
    get(room.member(1))
    get(room.member(2))
    making.join()
    for member in room.members:
        member.close()
    with pytest.raises(PeerLost, match="looking for the vector that all workers share"):
        get(room.member(0), later=True)


def test_others_wait_for_the_first_until_it_is_lost(room: Room) -> None:
    room.gone.add(0)
    with pytest.raises(PeerLost) as caught:
        get(room.member(1))
    assert caught.value.rank == 0


def test_where_one_cannot_have_it_the_first_refuses_as_well(room: Room) -> None:
    making = room.first()
    get(room.member(1))
    with pytest.raises(NoSharedMemory, match="several hosts, or hidden"):
        get(room.member(2, shares=False))
    making.join()
    assert isinstance(room.made, NoSharedMemory)
    assert "several hosts" in room.made.reason


def test_memory_of_another_process_that_has_the_number_now_is_not_taken_for_it(room: Room) -> None:
    making = room.first()
    get(room.member(1))
    get(room.member(2))
    making.join()
    room.members[0].close()  # and somebody else opens a file under its descriptor
    for key in (f"w/has/{rank}" for rank in MEMBERS):
        offer = room.store.get(key).decode()
        room.store.set(key, offer.replace('"token": "', '"token": "0'))
    with pytest.raises(PeerLost):
        get(room.member(0), later=True)
