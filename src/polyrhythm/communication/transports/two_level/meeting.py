"""How the members of a communicator come to collectives that use the memory which they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyrhythm.communication.transports.member_collectives import MemberCollectives
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.shared_memory.meeting import host_of, share_memory
from polyrhythm.communication.transports.two_level.collectives import TwoLevelCollectives
from polyrhythm.communication.transports.two_level.levels import Levels

Meet = Callable[[Sequence[int], str, str], list[str]]
"""Tells some members a word under a name, and gives theirs, in their order, when all have come."""

MakeNetwork = Callable[[Sequence[int]], MemberCollectives]
"""Makes the collectives of some members, of whom this is one, that need no shared memory."""


@dataclass(frozen=True)
class Acquaintance:
    """What the members of a communicator know of each other.

    Attributes:
        member: this one.
        members: the ranks of all, among all ranks of the run.
        introductions: of all, as JSON.
    """

    member: int
    members: tuple[int, ...]
    introductions: Sequence[str]


def make_shared(
    known: Acquaintance, meet: Meet, network: MakeNetwork
) -> SharedMemoryCollectives | TwoLevelCollectives | None:
    """Makes collectives that use the memory which members share; None where none share any, on all alike.

    Args:
        known: who is where.
        meet: how to talk to the others.
        network: makes what goes between hosts.
    """
    levels = Levels.of([host_of(introduction) for introduction in known.introductions])
    host = levels.hosts[levels.host(known.member)]
    inside = _share(host, known, meet) if len(host) > 1 else None
    if not levels.mixed:
        return inside
    lacking = inside is None and len(host) > 1
    if not all(meet(range(len(known.members)), "levels", "" if lacking else "ready")):
        if inside is not None:
            inside.close()
        return None
    leads = known.member == host[0]
    between = network(levels.leaders) if leads else None
    return TwoLevelCollectives(levels, known.member, inside, between)


def _share(host: tuple[int, ...], known: Acquaintance, meet: Meet) -> SharedMemoryCollectives | None:
    """Makes the collectives of one host's members."""
    ranks = tuple(known.members[member] for member in host)

    def tell_all(subject: str, word: str) -> list[str]:
        return meet(host, f"{host[0]}/{subject}", word)

    introductions = [known.introductions[member] for member in host]
    return share_memory(host.index(known.member), ranks, introductions, tell_all)
