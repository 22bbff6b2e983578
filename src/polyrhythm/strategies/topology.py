"""Topologies: directed graphs of workers, with the weights of the parameters that they exchange.

In every turn worker i sends to its targets, and then holds a weighted sum of its own and the received
parameters:

    x_i' = sum_j P_ij x_j          P_ij the share of worker j's parameters that goes to worker i

Columns of P sum to 1: every worker distributes all of its own parameters, its own share included, so sums are
conserved. If rows sum to 1 as well, the mean is conserved.

Functions of graphs: reachable workers, number of turns until a message has reached every worker, and the rate
at which differences shrink (the mixing rate rho).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

TOPOLOGIES = "polyrhythm.strategies.topologies"
"""The folder of choices."""


@dataclass(frozen=True)
class Shares:
    """Weights of one worker's exchanges in one turn.

    Attributes:
        own: share of its parameters that it keeps.
        takes: senders, in ascending order, with the share of their parameters that this worker receives.
        gives: receivers, in ascending order, with the share of its own parameters that they receive.
    """

    own: float
    takes: dict[int, float]
    gives: dict[int, float]


class Topology(Config):
    """An undirected graph with Metropolis weights; subclasses override what differs.

    Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation", JPDC 2007:
    `P_ij = 1 / (1 + max(degree of i, degree of j))`, which makes P symmetric and its rows and columns add up to 1.
    """

    def period(self, peers: int) -> int:
        """Return the number of turns after which the schedule repeats; 1 if the graph is constant."""
        return 1

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        """Return the receivers of a peer's messages in a turn, in ascending order, without itself.

        Args:
            peer: index of the sender.
            peers: number of peers.
            turn: turn of the schedule.
        """
        raise NotImplementedError

    def sources(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        """Return the senders of a peer's messages in a turn, in ascending order."""
        return self.targets(peer, peers, turn)

    def weight(self, source: int, to: int, peers: int, turn: int = 0) -> float:
        """Return the share of one peer's parameters that another receives in a turn, along an existing edge."""
        degrees = (len(self.targets(peer, peers, turn)) for peer in (source, to))
        return 1 / (1 + max(degrees))

    def own_weight(self, peer: int, peers: int, turn: int = 0) -> float:
        """Return the share of its parameters that a peer keeps."""
        return 1.0 - sum(self.weight(peer, to, peers, turn) for to in self.targets(peer, peers, turn))

    def check(self, peers: int) -> None:
        """Reject a number of peers that this graph does not support, and a graph that is not connected.

        Raises:
            RequestError: the message has the reason and the alternatives.
        """
        self.check_connected(peers)

    def check_connected(self, peers: int) -> None:
        """Reject a graph that is not connected.

        Raises:
            RequestError: a worker cannot be reached, or cannot reach others; the message names it.
        """
        turns = range(self.period(peers))

        def reached(peer: int) -> list[int]:
            return [to for turn in turns for to in self.targets(peer, peers, turn)]

        def reaching(peer: int) -> list[int]:
            return [source for turn in turns for source in self.sources(peer, peers, turn)]

        if (lost := unreached(peers, reached)) is not None:
            way = f"from worker 0 to worker {lost}"
        elif (lost := unreached(peers, reaching)) is not None:
            way = f"from worker {lost} to worker 0"
        else:
            return
        raise RequestError(
            f"topology {self}: no path leads {way}, so {peers} workers would never agree: add an edge that joins them"
        )

    def shares(self, peer: int, peers: int, turn: int = 0) -> Shares:
        """Return the weights of one peer's exchanges in a turn."""
        return Shares(
            self.own_weight(peer, peers, turn),
            {source: self.weight(source, peer, peers, turn) for source in self.sources(peer, peers, turn)},
            {to: self.weight(peer, to, peers, turn) for to in self.targets(peer, peers, turn)},
        )

    def matrix(self, peers: int, turn: int = 0) -> Tensor:
        """Return P, `(peers, peers)`, float64: entry `[i, j]` is the share of peer j's parameters for peer i."""
        matrix = torch.zeros(peers, peers, dtype=torch.float64)
        for peer in range(peers):
            shares = self.shares(peer, peers, turn)
            matrix[peer, peer] = shares.own
            for to, weight in shares.gives.items():
                matrix[to, peer] = weight
        return matrix

    def rate(self, peers: int) -> float:
        """Return rho: the asymptotic factor by which the differences between peers shrink in a turn."""
        return mixing_rate([self.matrix(peers, turn) for turn in range(self.period(peers))])

    def spectral_gap(self, peers: int) -> float:
        """Return 1 - rho: 1 if one turn is enough for the mean, near 0 if information travels slowly."""
        return 1.0 - self.rate(peers)

    def turns_to_all(self, peers: int) -> int:
        """Return the number of turns after which information from any peer has reached all."""
        return _turns_to_all(self, peers)


class Circulant(Topology):
    """A circulant graph: peer i sends to i + k for every offset k, with equal weights."""

    def offsets(self, peers: int, turn: int = 0) -> Sequence[int]:
        """Return the offsets of a turn, between 1 and `peers - 1`, each once."""
        raise NotImplementedError

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return sorted((peer + offset) % peers for offset in self.offsets(peers, turn))

    def sources(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return sorted((peer - offset) % peers for offset in self.offsets(peers, turn))

    def weight(self, source: int, to: int, peers: int, turn: int = 0) -> float:
        return 1 / (1 + len(self.offsets(peers, turn)))

    def own_weight(self, peer: int, peers: int, turn: int = 0) -> float:
        return 1 / (1 + len(self.offsets(peers, turn)))

    def check(self, peers: int) -> None:
        """Accept any number: offset 1 occurs in some turn."""


@cache
def _turns_to_all(topology: Topology, peers: int) -> int:
    schedule = range(topology.period(peers))
    return turns_to_all([[topology.sources(peer, peers, turn) for peer in range(peers)] for turn in schedule])


Neighbors = Callable[[int], Sequence[int]]
"""Function from a peer to the receivers of its messages."""

_ROUNDING = 1e-12


def unreached(peers: int, neighbors: Neighbors) -> int | None:
    """Return the first peer that is unreachable from peer 0, or None.

    Args:
        peers: number of peers.
        neighbors: function from a peer to its targets.
    """
    seen, waiting = {0}, [0]
    while waiting:
        for other in neighbors(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return next((peer for peer in range(peers) if peer not in seen), None)


def turns_to_all(sources: Sequence[Sequence[Sequence[int]]]) -> int:
    """Return the number of turns after which information from any peer has reached all, if messages pass it on.

    Args:
        sources: senders to every peer, for every turn of a periodic schedule.

    Returns:
        Number of turns from the worst start; 0 for a single peer.
    """
    peers = len(sources[0])
    all_peers = (1 << peers) - 1
    worst = 0
    for first in range(len(sources)):
        known = [1 << peer for peer in range(peers)]  # one bit for each peer that is known
        turns = 0
        while any(words != all_peers for words in known):
            received = sources[(first + turns) % len(sources)]
            known = [_joined(known, peer, received[peer]) for peer in range(peers)]
            turns += 1
        worst = max(worst, turns)
    return worst


def _joined(known: list[int], peer: int, sources: Sequence[int]) -> int:
    words = known[peer]
    for source in sources:
        words |= known[source]
    return words


def mixing_rate(matrices: Sequence[Tensor]) -> float:
    """Return rho, the asymptotic factor by which the differences between peers shrink in a turn.

    That is the second largest modulus among the eigenvalues of the product of all matrices, per turn.

    Args:
        matrices: `(N, N)` each, float64, one per turn of a periodic schedule; columns (or rows) sum to 1.
    """
    whole = matrices[0]
    for matrix in matrices[1:]:
        whole = matrix @ whole
    if len(whole) == 1:
        return 0.0
    if float((whole - whole.mean(1, keepdim=True)).abs().max()) < _ROUNDING:
        return 0.0  # all columns are equal: the mean itself, with other eigenvalues of 0 up to rounding
    moduli = torch.linalg.eigvals(whole).abs().sort(descending=True).values
    return math.pow(float(moduli[1]), 1 / len(matrices))
