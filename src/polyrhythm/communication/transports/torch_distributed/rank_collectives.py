"""The collectives of one rank's communicators: how they are made, and how they end."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.transports.between_hosts.collectives import HostCollectives
from polyrhythm.communication.transports.between_hosts.meeting import Place, connect_all
from polyrhythm.communication.transports.collective_broken import REVOKED, CollectiveBroken
from polyrhythm.communication.transports.member_collectives import MemberCollectives
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.meeting import Introduction
from polyrhythm.communication.transports.shared_memory.vector import share_vector
from polyrhythm.communication.transports.torch_distributed.collectives import GlooCollectives
from polyrhythm.communication.transports.torch_distributed.groups import Groups
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.communication.transports.two_level.meeting import Acquaintance, make_shared
from polyrhythm.errors import PeerLost

_FIRST_MEETING_INTERVAL_S, _MEETING_INTERVAL_S = 0.0005, 0.02

_MOST_HOSTS = 16
"""That talk each with all others. With more, one receiver's switch would have too many senders at once."""


@dataclass(frozen=True)
class Standing:
    """What is known of the others while collectives are made.

    Attributes:
        is_lost: whether a rank is known to be gone.
        check: raises `CollectiveBroken` if a communicator of a lineage has been revoked.
        patience_s: gives how long there may be no way to another host before its ranks count as lost.
    """

    is_lost: Callable[[int], bool]
    check: Callable[[tuple[int, ...]], None]
    patience_s: Callable[[], float]


class RankCollectives:
    """Makes collectives on the CPU: through shared memory where ranks share a host.

    Args:
        rendezvous: how to meet the others.
        groups: makes gloo's groups.
        standing: what is known of the others.
        shared_memory: whether to use it.
    """

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
        """Makes the collectives of some ranks; all of them call it.

        Raises:
            PeerLost: one of them is known to be gone, or they have been given up meanwhile.
        """
        made = self._make(name, members, lineage)
        with self._lock:
            self._in_use.append(_InUse(made, members, lineage))
        try:  # what happened since they met has not been told to these
            self._standing.check(lineage)
            useless = any(map(self._standing.is_lost, members))
        except CollectiveBroken:
            useless = True
        if useless:
            made.give_up(CollectiveBroken(REVOKED))
        return made

    def vector_to_sum(self, name: str, members: tuple[int, ...], like: Tensor) -> Tensor:
        """Makes a vector of zeros that some ranks share, if all of them are on this host; all of them call it."""
        introductions = self._meet(name, members, self._introduction(), ())

        def tell_all(subject: str, word: str) -> list[str]:
            return self._meet(f"{name}/{subject}", members, word, ())

        return share_vector(members.index(self._rendezvous.rank), introductions, like, tell_all)

    def revoke(self, context: int, later: Callable[[Callable[[], None]], object]) -> None:
        """Ends those of a communicator, and of all that are parts of it.

        Args:
            context: of the communicator.
            later: runs something that may take a while.
        """
        with self._lock:
            ended = [entry for entry in self._in_use if context in entry.lineage]
            self._in_use = [entry for entry in self._in_use if entry not in ended]
        for entry in ended:
            entry.made.give_up(CollectiveBroken(REVOKED))
            later(entry.made.close)

    def lose(self, peer: Peer) -> None:
        """Ends those that a rank takes part in which is gone."""
        with self._lock:
            broken = [entry.made for entry in self._in_use if peer.rank in entry.members]
        for made in broken:
            made.give_up(CollectiveBroken(f"rank {peer.rank} is gone", peer.rank))

    def close(self) -> None:
        """Leaves all."""
        for entry in self._in_use:
            entry.made.close()

    def _make(self, name: str, members: tuple[int, ...], lineage: tuple[int, ...]) -> MemberCollectives:
        member = members.index(self._rendezvous.rank)
        introductions = self._meet(name, members, self._introduction(), lineage)

        def meet(who: Sequence[int], subject: str, word: str) -> list[str]:
            return self._meet(f"{name}/{subject}", tuple(members[each] for each in who), word, lineage)

        def network(who: Sequence[int]) -> MemberCollectives:
            return self._over_network(name, tuple(members[each] for each in who), lineage)

        found = make_shared(Acquaintance(member, members, introductions), meet, network)
        return found or network(range(len(members)))

    def _over_network(self, name: str, ranks: tuple[int, ...], lineage: tuple[int, ...]) -> MemberCollectives:
        """Makes collectives that share no memory."""
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

    def _meet(self, name: str, members: tuple[int, ...], word: str, lineage: tuple[int, ...]) -> list[str]:
        """Returns when all members have called it with this name, however late; gives everyone's word.

        Raises:
            PeerLost: one of them is known to be gone, or a communicator of the lineage has been revoked.
        """
        store = self._rendezvous.store
        store.set(f"{name}/met/{self._rendezvous.rank}", word)
        keys = [f"{name}/met/{member}" for member in members]
        pause_s = _FIRST_MEETING_INTERVAL_S
        while not store.check(keys):
            self._check(members, lineage)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MEETING_INTERVAL_S)
        return [value.decode() for value in store.multi_get(keys)]

    def _check(self, members: tuple[int, ...], lineage: tuple[int, ...]) -> None:
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
