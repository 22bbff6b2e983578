"""The collectives of one rank's communicators on the CPU: how they are made, and how they end.

They go through shared memory where ranks share a host, over TCP between few hosts, and by gloo otherwise. A
failure of gloo on one rank is made a failure on every rank.
"""

from __future__ import annotations

import ctypes
import json
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.transports.between_hosts.collectives import HostCollectives
from polyrhythm.communication.transports.between_hosts.connections import Place, connect_all
from polyrhythm.communication.transports.member_collectives import (
    REVOKED,
    CollectiveBroken,
    MemberCollectives,
)
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.meeting import Introduction
from polyrhythm.communication.transports.torch_distributed.rendezvous import Groups, Rendezvous
from polyrhythm.communication.transports.torch_distributed.shared_vectors import share_vector
from polyrhythm.communication.transports.two_level import make_shared
from polyrhythm.errors import PeerLost

_LOOK_EVERY = timedelta(milliseconds=50)


class CollectiveHandle(Handle):
    """A collective of the library in progress, and what to do with its result.

    Args:
        work: the library's; None where there is nothing to do.
        finish: callback, called once, when the work has ended.
        fail: callback, called once, with the reason, when the work failed.
    """

    def __init__(
        self, work: Any, finish: Callable[[], None] | None = None, fail: Callable[[str], None] | None = None
    ) -> None:
        self._work = work
        self._finish = finish
        self._fail = fail
        self._reason = ""

    def done(self) -> bool:
        work = self._work
        return work is None or bool(work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            self._end()
        if self._reason:
            raise CollectiveBroken(self._reason)

    def _end(self) -> None:
        # In a frame of its own: the traceback of an error in `wait` must not hold the work, and so its connections.
        work = self._work
        try:
            while not self._ends(work):
                if self._reason:  # another thread has given the whole group up
                    return
        except RuntimeError as error:
            reason = _essence(str(error))
        else:
            if self._finish is not None and self._work is not None:
                self._finish()
            self._work = None
            return
        self.abandon(reason)
        del work
        if self._fail is not None:
            self._fail(reason)

    def _ends(self, work: Any) -> bool:
        """Wait, but no longer than until another thread may have given up; return whether the collective has ended.

        Raises:
            RuntimeError: it broke.
        """
        if self._fail is None:  # errors are not handled
            work.wait()
            return True
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            if not work.is_completed():
                return False  # it only takes long
            work.wait()  # it may have succeeded since; else this raises its error
        return True

    def under_way(self) -> Any:
        """Return the library's work, if it has not ended."""
        return None if self.done() else self._work

    def abandon(self, reason: str) -> None:
        """Give the collective up; `wait` raises `reason` from now on."""
        self._work, self._reason = None, self._reason or reason


class GlooCollectives(MemberCollectives):
    """The gloo group of one communicator.

    Gloo breaks only those collectives that talk to the lost rank themselves; the other members would wait for ever
    for those that have failed. So a rank that sees one break lets go of the whole group. That closes its
    connections, and so the news travels around:

        rank 2 dies ─▶ 1 and 3 fail and let go ─▶ 0 and 4 fail and let go ─▶ …
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._handles: weakref.WeakSet[CollectiveHandle] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._reason = ""

    def start(
        self, operation: Callable[[Any], Any], finish: Callable[[], None] | None = None
    ) -> CollectiveHandle:
        """Start a collective.

        Args:
            operation: function that starts it on a group and returns the library's `Work`.
            finish: callback, called when it has succeeded.

        Raises:
            CollectiveBroken: an earlier one broke.
        """
        with self._lock:  # every rank must start its collectives in the same order
            if self._group is None:
                raise CollectiveBroken(self._reason)
            handle = CollectiveHandle(operation(self._group), finish, self._release)
            self._handles.add(handle)
        return handle

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> CollectiveHandle:
        return self.start(lambda group: group.allreduce([tensor]), finish)

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        copy = tensor.detach().contiguous()
        self.start(lambda group: group.broadcast(copy, root)).wait()
        if copy.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(copy)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def give_up(self, reason: CollectiveBroken) -> None:
        with self._lock:
            under_way = [work for handle in self._handles if (work := handle.under_way()) is not None]
            if under_way:  # the library cannot let go of them, and would wait for ever if it were made to
                _keep_for_ever((self._group, under_way))
        self._release(reason.reason)

    def close(self) -> None:
        """Leave nothing behind: the library ends its connections with the process."""

    def _release(self, reason: str) -> None:
        with self._lock:
            handles, self._handles = list(self._handles), weakref.WeakSet()
            group, self._group, self._reason = self._group, None, reason
        for handle in handles:  # each holds the group's connections open
            handle.abandon(reason)
        del group


def _keep_for_ever(kept: Any) -> None:
    """Make sure that something is never torn down, not even when the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _essence(text: str) -> str:
    """Return the first sentence of the library's message, without its place in the library."""
    sentence = text.splitlines()[0].partition(". ")[0]
    return sentence.partition("] ")[2] if sentence.startswith("[/") else sentence


_FIRST_MEETING_INTERVAL_S, _MEETING_INTERVAL_S, _REQUESTS_PER_S = 0.0005, 0.02, 250
"""First and longest interval of the requests of a rank that waits for others, and requests of many ranks together."""

_FEW = 16
"""Number of ranks that may ask as often as each likes."""

_MOST_HOSTS = 16
"""Largest number of fully connected hosts. With more, one receiver's switch would have too many senders."""


@dataclass(frozen=True)
class Standing:
    """State of the others while collectives are made.

    Attributes:
        is_lost: whether a rank is known to be gone.
        check: function that raises `CollectiveBroken` if a communicator of the given lineage has been revoked.
        patience_s: function that returns how long there may be no way to another host before its ranks count as lost.
    """

    is_lost: Callable[[int], bool]
    check: Callable[[tuple[int, ...]], None]
    patience_s: Callable[[], float]


class RankCollectives:
    """Makes collectives on the CPU: through shared memory where ranks share a host."""

    def __init__(
        self, rendezvous: Rendezvous, groups: Groups, standing: Standing, shared_memory: bool
    ) -> None:
        self._rendezvous = rendezvous
        self._groups = groups
        self._standing = standing
        self._shares_memory = shared_memory
        self._lock = threading.Lock()
        self._in_use: list[_InUse] = []

    def make(self, name: str, members: tuple[int, ...], lineage: tuple[int, ...]) -> MemberCollectives:
        """Make the collectives of some ranks; all of them call it.

        Raises:
            PeerLost: one of them is known to be gone, or they have been given up in the meantime.
        """
        made = self._make(name, members, lineage)
        with self._lock:
            self._in_use.append(_InUse(made, members, lineage))
        try:  # these have not been notified of events since they met
            self._standing.check(lineage)
            useless = any(map(self._standing.is_lost, members))
        except CollectiveBroken:
            useless = True
        if useless:
            made.give_up(CollectiveBroken(REVOKED))
        return made

    def vector_to_sum(self, name: str, members: tuple[int, ...], like: Tensor) -> Tensor:
        """Make a vector of zeros that some ranks share, if all of them are on this host; all of them call it."""
        introductions = self._meet(name, members, self._introduction(), ())

        def exchange_texts(subject: str, text: str) -> list[str]:
            return self._meet(f"{name}/{subject}", members, text, ())

        return share_vector(members.index(self._rendezvous.rank), introductions, like, exchange_texts)

    def seats(self, peers: Sequence[Peer], lineage: tuple[int, ...]) -> list[str]:
        """Return the seats of some ranks, once all of them have published theirs; see `seat_of`.

        Raises:
            PeerLost: one of them is known to be gone, or a communicator of the lineage has been revoked.
        """
        keys = [_seat(peer) for peer in peers]
        self._wait_for(keys, [peer.rank for peer in peers], lineage)
        return [value.decode() for value in self._rendezvous.store.multi_get(keys)]

    def take_seat(self, own: Peer, device: torch.device) -> None:
        """Publish this rank's seat."""
        self._rendezvous.store.set(_seat(own), seat_of(device))

    def revoke(self, context: int, later: Callable[[Callable[[], None]], object]) -> None:
        """End those of a communicator, and of all that are parts of it.

        Args:
            context: context of the communicator.
            later: runs something that may take a while.
        """
        with self._lock:
            ended = [entry for entry in self._in_use if context in entry.lineage]
            self._in_use = [entry for entry in self._in_use if entry not in ended]
        for entry in ended:
            entry.made.give_up(CollectiveBroken(REVOKED))
            later(entry.made.close)

    def lose(self, peer: Peer) -> None:
        """End the collectives in which a lost rank takes part."""
        with self._lock:
            broken = [entry.made for entry in self._in_use if peer.rank in entry.members]
        for made in broken:
            made.give_up(CollectiveBroken(f"rank {peer.rank} is gone", peer.rank))

    def close(self) -> None:
        """Leave all collectives."""
        for entry in self._in_use:
            entry.made.close()

    def _make(self, name: str, members: tuple[int, ...], lineage: tuple[int, ...]) -> MemberCollectives:
        member = members.index(self._rendezvous.rank)
        introductions = self._meet(name, members, self._introduction(), lineage)

        def meet(places: Sequence[int], subject: str, text: str) -> list[str]:
            return self._meet(f"{name}/{subject}", tuple(members[each] for each in places), text, lineage)

        def network(places: Sequence[int]) -> MemberCollectives:
            return self._over_network(name, tuple(members[each] for each in places), lineage)

        found = make_shared(member, members, introductions, meet, network)
        return found or network(range(len(members)))

    def _over_network(self, name: str, ranks: tuple[int, ...], lineage: tuple[int, ...]) -> MemberCollectives:
        """Make collectives that share no memory."""
        member = ranks.index(self._rendezvous.rank)
        if len(ranks) > _MOST_HOSTS or not hasattr(select, "epoll"):
            return GlooCollectives(self._groups.gloo(f"{name}/network", member, len(ranks)))
        place = Place(
            member, self._rendezvous.address, self._rendezvous.key, lambda: self._check(ranks, lineage)
        )
        connections = connect_all(place, lambda word: self._meet(f"{name}/network", ranks, word, lineage))
        return HostCollectives(member, ranks, connections, self._standing.patience_s())

    def _introduction(self) -> str:
        return Introduction.own(self._rendezvous.address, self._shares_memory).to_json()

    def _meet(self, name: str, members: tuple[int, ...], text: str, lineage: tuple[int, ...]) -> list[str]:
        """Return when all members have called it with this name, however late; return everyone's word.

        Raises:
            PeerLost: one of them is known to be gone, or a communicator of the lineage has been revoked.
        """
        store = self._rendezvous.store
        store.set(f"{name}/met/{self._rendezvous.rank}", text)
        keys = [f"{name}/met/{member}" for member in members]
        # The last member sets one key to the texts of all: otherwise each of N ranks would ask for N keys repeatedly.
        everyone = f"all of {blake2b(' '.join(keys).encode(), digest_size=16).hexdigest()}"
        if store.add(f"number of {everyone}", 1) >= len(keys) and store.check(keys):
            store.set(everyone, json.dumps([value.decode() for value in store.multi_get(keys)]))
        self._wait_for([everyone], members, lineage)
        texts: list[str] = json.loads(store.get(everyone))
        return texts

    def _wait_for(self, keys: list[str], members: Sequence[int], lineage: tuple[int, ...]) -> None:
        """Return once all these keys are in the store."""
        pause_s = _FIRST_MEETING_INTERVAL_S
        longest_s = max(_MEETING_INTERVAL_S, (len(members) - _FEW) / _REQUESTS_PER_S)
        while not self._rendezvous.store.check(keys):
            self._check(members, lineage)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _check(self, members: Sequence[int], lineage: tuple[int, ...]) -> None:
        self._standing.check(lineage)
        for lost in filter(self._standing.is_lost, members):
            raise PeerLost(lost, "waiting for all ranks to start a collective")


@dataclass(frozen=True)
class _InUse:
    """Collectives in use.

    Attributes:
        made: the collectives.
        members: global ranks that take part.
        lineage: contexts of the communicators that they are a part of.
    """

    made: MemberCollectives
    members: tuple[int, ...]
    lineage: tuple[int, ...]


def seat_of(device: torch.device) -> str:
    """Return a text that is equal for two ranks if they compute on one GPU; empty for one that computes on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def each_has_a_gpu(seats: Sequence[str]) -> bool:
    """Return whether each rank has a GPU that no other has: NCCL shares none, and never hears of a CPU's rank."""
    return all(seats) and len(set(seats)) == len(seats)


def _seat(peer: Peer) -> str:
    return f"seat/{peer.rank}/{peer.generation}"
