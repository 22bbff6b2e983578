"""Where a network's pieces are cut into stages.

    cuts    piece 0 … c_1 - 1 | c_1 … c_2 - 1 | …        bounds: 0, c_1, c_2, …, number of pieces

Either at given layers, or so that the slowest stage takes as little time as it can (`balanced`), by the operations of
its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from polyrhythm.errors import RequestError
from polyrhythm.training.model_sizes import PieceSize

Bounds = tuple[int, ...]
"""The first piece of every stage, and at the end the number of pieces."""


def check_stages(pieces: Sequence[PieceSize], stages: int, where: str) -> None:
    """Refuse more stages than there are pieces.

    Raises:
        RequestError: there are.
    """
    if stages > len(pieces):
        names = ", ".join(piece.name for piece in pieces[:8]) + (", …" if len(pieces) > 8 else "")
        raise RequestError(
            f"{where} asks for {stages} stages, and the network can be cut into {len(pieces)} pieces at most "
            f"({names}): ask for fewer stages"
        )


def given(pieces: Sequence[PieceSize], layers: Sequence[str], stages: int, where: str) -> Bounds:
    """Return the bounds of stages that begin behind given layers.

    Args:
        pieces: of the network.
        layers: names of the last layers of all stages but the last.
        stages: how many there are.
        where: names the strategy, for people.

    Raises:
        RequestError: a layer is none, or cannot be cut behind; or they are too few or too many.
    """
    if len(layers) != stages - 1:
        raise RequestError(
            f"{where} cuts behind {len(layers)} layers, which makes {len(layers) + 1} stages of {stages}: name "
            f"{stages - 1} layers"
        )
    bounds = [0]
    for layer in layers:
        behind = [
            number + 1
            for number, piece in enumerate(pieces[:-1])
            if piece.name == layer or piece.name.startswith(f"{layer}.")
        ]
        if not behind:
            names = ", ".join(piece.name for piece in pieces[:-1])
            raise RequestError(
                f"{where}: the network cannot be cut behind {layer!r:.80}; it can behind {names:.400}"
            )
        bounds.append(behind[-1])
    if bounds != sorted(set(bounds)):
        raise RequestError(f"{where}: the layers to cut behind must be in the network's order")
    return (*bounds, len(pieces))


def balanced(pieces: Sequence[PieceSize], stages: int) -> Bounds:
    """Return the bounds of so many stages whose slowest takes as little as it can; ties go to fewer values sent."""
    count = len(pieces)
    times = shares(pieces)
    sums = [0.0, *accumulate(times)]
    # best[n]: for the first n pieces in as many stages as have been made: (slowest, values sent, first piece of last)
    best: list[tuple[float, int, Bounds] | None] = [
        (sums[stop], 0, (0, stop)) if stop else None for stop in range(count + 1)
    ]
    for stage in range(1, stages):
        following: list[tuple[float, int, Bounds] | None] = [None] * (count + 1)
        for stop in range(stage + 1, count + 1):
            found: tuple[float, int, Bounds] | None = None
            for start in range(stage, stop):
                before = best[start]
                if before is None:
                    continue
                slowest = max(before[0], sums[stop] - sums[start])
                sent = before[1] + sum(pieces[start - 1].outputs)
                if found is None or (slowest, sent) < found[:2]:
                    found = slowest, sent, (*before[2], stop)
            following[stop] = found
        best = following
    whole = best[count]
    assert whole is not None, "there are as many pieces as stages"
    return whole[2]


def shares(pieces: Sequence[PieceSize]) -> tuple[float, ...]:
    """Return each piece's share of the network's time: that of its operations; of its parameters, if none counts."""
    for weights in ([piece.operations for piece in pieces], [float(piece.parameters) for piece in pieces]):
        if sum(weights) > 0:
            return tuple(weight / sum(weights) for weight in weights)
    return tuple(1 / len(pieces) for _ in pieces)


def share_of_stages(pieces: Sequence[PieceSize], bounds: Bounds) -> tuple[float, ...]:
    """Return each stage's share of the network's time."""
    found = shares(pieces)
    return tuple(sum(found[start:stop]) for start, stop in pairwise(bounds))
