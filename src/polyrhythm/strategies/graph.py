"""Graphs of workers: who is reached, how soon a word is everywhere, and how fast averages spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Neighbours = Callable[[int], Sequence[int]]
"""Gives the peers that a peer's messages go to."""

_ROUNDING = 1e-12


def unreached(peers: int, neighbours: Neighbours) -> int | None:
    """Gives the first peer that no path leads to from peer 0, or None.

    Args:
        peers: how many there are.
        neighbours: of each.
    """
    seen, waiting = {0}, [0]
    while waiting:
        for other in neighbours(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return next((peer for peer in range(peers) if peer not in seen), None)


def turns_to_all(sources: Sequence[Sequence[Sequence[int]]]) -> int:
    """Gives after how many turns a word of anybody's is everywhere, if each turn's messages pass on what was known.

    Args:
        sources: for every turn of a schedule that repeats, and every peer, whom it hears.

    Returns:
        At the worst turn to begin with; 0 for a single peer.
    """
    peers = len(sources[0])
    everybody = (1 << peers) - 1
    worst = 0
    for first in range(len(sources)):
        known = [1 << peer for peer in range(peers)]  # one bit for each peer whose word has come
        turns = 0
        while any(words != everybody for words in known):
            heard = sources[(first + turns) % len(sources)]
            known = [_joined(known, peer, heard[peer]) for peer in range(peers)]
            turns += 1
        worst = max(worst, turns)
    return worst


def _joined(known: list[int], peer: int, sources: Sequence[int]) -> int:
    words = known[peer]
    for source in sources:
        words |= known[source]
    return words


def mixing_rate(matrices: Sequence[Tensor]) -> float:
    """Gives the factor by which what peers differ in shrinks in a turn, in the long run: rho.

    That is the second largest modulus among the eigenvalues of the product of all matrices, per turn.

    Args:
        matrices: `(N, N)` each, float64, one a turn of a schedule that repeats; columns (or rows) add up to 1.
    """
    whole = matrices[0]
    for matrix in matrices[1:]:
        whole = matrix @ whole
    if len(whole) == 1:
        return 0.0
    if float((whole - whole.mean(1, keepdim=True)).abs().max()) < _ROUNDING:
        return (
            0.0  # all columns are the same: the mean itself, whose other eigenvalues are 0 but for rounding
        )
    moduli = torch.linalg.eigvals(whole).abs().sort(descending=True).values
    return math.pow(float(moduli[1]), 1 / len(matrices))
