"""Cost of an all-reduce, by algorithm: seconds, and the messages and bytes that each rank sends.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005;
Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", CCPE
2007; Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.

Seconds (`…_s`) assume that all ranks start together and that the links are otherwise idle. N = ranks, M = the
payload's bytes, the rest as in `machine`. Every formula is exact for whole elements, so also if N does not
divide them. With `overhead_s=α` and no header it is the textbooks'. Sums do not overlap with messages.
The formulas in the docstrings hold for N > 1; one rank alone needs no time.

Messages and bytes (`Sent`) do not count headers. All ranks together send `2 (N-1) M` bytes, whatever the
algorithm, except recursive doubling: `N log2 N M`, and vectors that travel whole: `N (N-1) M`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from polyrhythm.cost.machine import Machine, Payload


def floor_log2(number: int) -> int:
    """Return the largest k with 2^k <= number."""
    return number.bit_length() - 1


def ceil_log2(number: int) -> int:
    """Return the smallest k with 2^k >= number."""
    return (number - 1).bit_length()


def flat_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """One rank gathers all and sends the sum to all: `2 (N-1) (α + βM) + (N-1) γM`."""
    if ranks == 1:
        return 0.0
    ports = 2 * (ranks - 1) if machine.shared_receiver else ranks
    messages_s = 2 * machine.latency_s + ports * machine.port_s(payload.nbytes)
    return messages_s + (ranks - 1) * machine.reduce_s(payload.nbytes)


def binomial_tree_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Reduce up a tree, broadcast down it: `2 ⌈log2 N⌉ (α + βM) + ⌈log2 N⌉ γM`.

    L counts only `⌊log2 N⌋` times each way. If N is no power of two and receivers' ports are shared, small subtrees
    send early, and the way up takes up to `o + β (M+H)` less.
    """
    rounds, hops = ceil_log2(ranks), floor_log2(ranks)
    ports = rounds + (rounds if machine.shared_receiver else hops)
    messages_s = 2 * hops * machine.latency_s + ports * machine.port_s(payload.nbytes)
    return messages_s + rounds * machine.reduce_s(payload.nbytes)


def recursive_doubling_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Pairs at doubling distance exchange all: `log2 N (α + βM + γM)`.

    If N is no power of two: `⌊log2 N⌋` rounds, and `2 (α + βM) + γM` to fold the others in and out. If only one is
    folded, its partner finds the others' messages already there, and up to one L less counts.
    """
    rounds, nbytes = floor_log2(ranks), payload.nbytes
    sums_s = (rounds + (ranks & (ranks - 1) > 0)) * machine.reduce_s(nbytes)
    if ranks - (1 << rounds) == 1:
        late_s = 2 * machine.message_s(nbytes) + rounds * machine.port_s(nbytes)
        return sums_s + max(late_s, (rounds + 1) * machine.message_s(nbytes))
    folds = 2 * (ranks & (ranks - 1) > 0)
    return sums_s + (rounds + folds) * machine.message_s(nbytes)


def ring_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Slices go around twice: `2 (N-1) α + 2 (N-1)/N βM + (N-1)/N γM`."""
    slice_bytes = payload.first_bytes(1, ranks)
    return (ranks - 1) * (2 * machine.message_s(slice_bytes) + machine.reduce_s(slice_bytes))


def rabenseifner_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Halves, quarters, … are exchanged and reduced, then gathered.

    `2 log2 N α + 2 (N-1)/N βM + (N-1)/N γM`; if N is no power of two, folded as in recursive doubling.
    """
    core = 1 << floor_log2(ranks)
    seconds = _fold_s(machine, ranks, payload)
    for level in range(floor_log2(ranks)):
        exchanged = payload.first_bytes(1 << level, core)
        seconds += 2 * machine.message_s(exchanged) + machine.reduce_s(exchanged)
    return seconds


def direct_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Every rank reduces one slice and sends it to the others: `2 (N-1) α + 2 (N-1)/N βM + (N-1)/N γM`, with only 2 L.

    If N does not divide the elements, shared receivers' ports are assumed independent; the error is less than
    an element's bytes per message.
    """
    if ranks == 1:
        return 0.0
    ports = [machine.port_s(nbytes) for nbytes in payload.slice_bytes(ranks)]
    # The last of the ranks with a long slice, or else of all ranks, ends last.
    last_long = (payload.elements - 1) % ranks
    ends = [_direct_end_s(machine, ports, rank) for rank in {last_long, ranks - 1}]
    return max(ends) + (ranks - 1) * machine.reduce_s(payload.first_bytes(1, ranks))


WHOLE_BYTES, MORE_BYTES = 64 << 10, 8 << 10
"""Size up to which a vector may travel whole, and bytes that a rank may send for it beyond those of slices.

Whole vectors save 0.3 ms of latencies and wake-ups. 8 KiB take 0.07 ms at 1 Gb/s, and 7 ms at 10 Mb/s.
"""


def travels_whole(nbytes: int, ranks: int) -> bool:
    """Return whether the communicator's own all-reduce sends a vector whole to all other ranks, and cuts no slices."""
    return nbytes <= WHOLE_BYTES and nbytes * (ranks - 1) * (ranks - 2) <= MORE_BYTES * ranks


def whole_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Every rank sends its vector to all others, and reduces them itself: `(N-1) (α + βM) + (N-1) γM`, with one L."""
    if ranks == 1:
        return 0.0
    ports_s = (ranks - 1) * machine.port_s(payload.nbytes)
    return machine.latency_s + ports_s + (ranks - 1) * machine.reduce_s(payload.nbytes)


def segmented_chain_s(machine: Machine, ranks: int, payload: Payload, segments: int) -> float:
    """Segments are reduced along a chain, then broadcast back: `2 (N+S-2) (α + βM/S) + (N+S-2) γM/S`.

    Of L, `2 (N-1)` count, whatever S.
    """
    if ranks == 1:
        return 0.0
    longest = payload.first_bytes(1, segments)
    ports_s = segments * machine.port_s(payload.nbytes / segments) + (ranks - 2) * machine.port_s(longest)
    sums_s = machine.reduce_s(payload.nbytes) + (ranks - 2) * machine.reduce_s(longest)
    return 2 * ((ranks - 1) * machine.latency_s + ports_s) + sums_s


def best_segments(overhead_bytes: float, ranks: int, payload: Payload) -> int:
    """Return the S that minimizes the time of a segmented chain: about `√((N-2) βM/α)`, at most the number of elements.

    Args:
        overhead_bytes: α/β: cost of a message in addition to its payload, in bytes; above 0.
        ranks: N.
        payload: payload of M bytes.
    """
    best = round(sqrt(max(0, ranks - 2) * payload.nbytes / overhead_bytes))
    return max(1, min(best, payload.elements))


def lower_bound_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Lower bound of any all-reduce: the largest of `⌈log2 N⌉ o`, one L, `2 (N-1)/N βM` and `(N-1)/N γM`."""
    share = payload.nbytes * (ranks - 1) / ranks
    return max(
        ceil_log2(ranks) * machine.overhead_s,
        machine.latency_s if ranks > 1 else 0.0,
        2 * share * machine.seconds_per_byte,
        machine.reduce_s(share),
    )


def _fold_s(machine: Machine, ranks: int, payload: Payload) -> float:
    """Time for folding ranks in and out, down to the next lower power of two."""
    if ranks & (ranks - 1) == 0:
        return 0.0
    return 2 * machine.message_s(payload.nbytes) + machine.reduce_s(payload.nbytes)


def _direct_end_s(machine: Machine, ports: list[float], rank: int) -> float:
    """Time at which the last message of a rank's slice arrives; all send to rank 0 first, to the last rank last."""
    before = sum(ports[: rank + 1]) if rank < len(ports) - 1 else sum(ports) - min(ports[:-1])
    started = max(before + machine.latency_s, sum(ports) - ports[rank])
    return started + (len(ports) - 1) * ports[rank] + machine.latency_s


@dataclass(frozen=True)
class Sent:
    """Messages that a rank sends.

    Attributes:
        messages: number of messages.
        nbytes: number of bytes of their payloads.
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
    """Return a rank's children in the binomial tree under rank 0, the smallest subtree first.

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
    """The discarded half of every range that is halved; on the way back, every range that was kept."""
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
    """Return the largest power of two up to `ranks`; that many ranks exchange, the others are folded in and out."""
    return 1 << floor_log2(ranks)


def fold_partner(ranks: int, rank: int) -> int | None:
    """Return the rank that this one is folded into, or that is folded into it; None if it has no such partner.

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
    """Twice around the ring with all slices but one: first its own stays, then its replacement's."""
    ranks, whole = len(slice_bytes), sum(slice_bytes)
    if ranks == 1:
        return Sent()
    return Sent(2 * (ranks - 1), 2 * whole - slice_bytes[rank] - slice_bytes[(rank + 1) % ranks])


def direct(slice_bytes: Sequence[int], rank: int) -> Sent:
    """To each other rank that rank's slice, and later its own."""
    ranks, own = len(slice_bytes), slice_bytes[rank]
    return Sent(2 * (ranks - 1), sum(slice_bytes) + (ranks - 2) * own)


def segmented_chain(ranks: int, rank: int, payload: Payload, segments: int) -> Sent:
    """Every segment to one neighbor, and later to the other."""
    neighbors = (rank > 0) + (rank < ranks - 1)
    return Sent(segments, payload.nbytes) * neighbors
