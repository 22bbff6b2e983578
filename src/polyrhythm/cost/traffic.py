"""Messages and bytes that each rank sends in an all-reduce, by algorithm; headers are not counted.

All ranks together send `2 (N-1) M` bytes, whatever the algorithm, but for recursive doubling: `N log2 N M`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.cost.all_reduce import floor_log2
from polyrhythm.cost.machine import Payload


@dataclass(frozen=True)
class Sent:
    """What a rank sends.

    Attributes:
        messages: how many.
        nbytes: of their payloads.
    """

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.nbytes + other.nbytes)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.messages * times, self.nbytes * times)


def flat(ranks: int, rank: int, payload: Payload) -> Sent:
    """Rank 0 sends to all others, they to it."""
    return Sent(1, payload.nbytes) * (ranks - 1 if rank == 0 else 1)


def binomial_tree(ranks: int, rank: int, payload: Payload) -> Sent:
    """One message to the parent, one to each child."""
    return Sent(1, payload.nbytes) * (len(children(ranks, rank)) + (rank > 0))


def children(ranks: int, rank: int) -> list[int]:
    """Gives a rank's children in the binomial tree under rank 0, the smallest subtree first.

    A rank's parent is the rank without its lowest bit: 1, 3, 5, 7 have no children; 2, 6 have one; 4 has two.
    """
    distances = [1 << level for level in range((ranks - 1).bit_length())]
    lowest = rank & -rank if rank else ranks
    return [rank + distance for distance in distances if distance < lowest and rank + distance < ranks]


def recursive_doubling(ranks: int, rank: int, payload: Payload) -> Sent:
    """All in every round; the ranks beyond a power of two once."""
    rounds = 0 if rank >= core_size(ranks) else floor_log2(ranks)
    return Sent(1, payload.nbytes) * (rounds + (fold_partner(ranks, rank) is not None))


def rabenseifner(ranks: int, rank: int, payload: Payload) -> Sent:
    """Of every range that is halved, the half that is not kept; then, every range that was kept."""
    core = core_size(ranks)
    sent = Sent(1, payload.nbytes) * (fold_partner(ranks, rank) is not None)
    first, slices = 0, core
    while slices > 1 and rank < core:
        slices //= 2
        kept = first + (rank & slices)
        for start in (2 * first + slices - kept, kept):  # the other half, and this one on the way back
            nbytes = payload.first_bytes(start + slices, core) - payload.first_bytes(start, core)
            sent += Sent(1, nbytes)
        first = kept
    return sent


def core_size(ranks: int) -> int:
    """Gives the largest power of two that there are ranks for: as many exchange, the others are folded in and out."""
    return 1 << floor_log2(ranks)


def fold_partner(ranks: int, rank: int) -> int | None:
    """Gives the rank that this one is folded into, or that is folded into it; None if it has no such partner.

    The ranks beyond the core are folded into its last one, its first, its last but one, its second, … So the delay of
    folding in reaches a rank that folds out by all rounds, and folding costs the same for all numbers of ranks but one.
    """
    core = core_size(ranks)
    beyond = ranks - core
    if rank >= core:
        half, odd = divmod(rank - core, 2)
        return half if odd else core - 1 - half
    from_below, from_above = 2 * rank + 1, 2 * (core - 1 - rank)
    if from_below < beyond:
        return core + from_below
    return core + from_above if from_above < beyond else None


def ring(slice_bytes: Sequence[int], rank: int) -> Sent:
    """On each of two ways around all slices but one: first its own, then its successor's stays."""
    ranks, whole = len(slice_bytes), sum(slice_bytes)
    if ranks == 1:
        return Sent()
    return Sent(2 * (ranks - 1), 2 * whole - slice_bytes[rank] - slice_bytes[(rank + 1) % ranks])


def direct(slice_bytes: Sequence[int], rank: int) -> Sent:
    """To each other rank that rank's slice, and later its own."""
    ranks, own = len(slice_bytes), slice_bytes[rank]
    return Sent(2 * (ranks - 1), sum(slice_bytes) + (ranks - 2) * own)


def segmented_chain(ranks: int, rank: int, payload: Payload, segments: int) -> Sent:
    """Every segment to the one neighbour, and later to the other."""
    neighbours = (rank > 0) + (rank < ranks - 1)
    return Sent(segments, payload.nbytes) * neighbours
