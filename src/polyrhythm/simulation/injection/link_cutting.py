"""Cutting links for a time; what lasts too long breaks them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations

from polyrhythm.simulation.injection.fault import FaultyRun
from polyrhythm.simulation.injection.faulty_links import CutLinks


def cut_links(
    run: FaultyRun, concerns: Callable[[int, int], bool], from_s: float, to_s: float, broken_after_s: float
) -> None:
    """Cuts links.

    Args:
        run: whose.
        concerns: whether the link between two ranks is cut; the same both ways.
        from_s: when.
        to_s: until when.
        broken_after_s: the connections are lost after so long.
    """
    run.links.cuts.append(CutLinks(concerns, from_s, to_s))
    run.links.cuts.sort(key=lambda cut: cut.to_s)
    if from_s + broken_after_s < to_s:
        run.time.at(from_s + broken_after_s, partial(_break_links, run, concerns))


def _break_links(run: FaultyRun, concerns: Callable[[int, int], bool]) -> None:
    living = [rank for rank in run.ranks if rank.alive]
    for one, other in combinations(living, 2):
        if concerns(one.rank, other.rank):
            one.break_link(other)
            other.break_link(one)
