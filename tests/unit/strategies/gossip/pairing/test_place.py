"""Who averages with whom, and who of the two asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.specs import build, choices
from polyrhythm.strategies.gossip.pairing.keeper import Place, place_of
from polyrhythm.strategies.topologies.complete import Complete
from polyrhythm.strategies.topologies.file import File
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topologies.star import Star
from polyrhythm.strategies.topology import TOPOLOGIES, Topology, unreached


def places(topology: Topology, workers: int) -> list[Place]:
    return [place_of(topology, range(workers), worker) for worker in range(workers)]


@pytest.mark.parametrize("workers", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize(
    "spec", [name for name in choices(TOPOLOGIES) if name not in ("file", "random_regular")]
)
def test_pairs_have_one_of_each_color_and_join_everybody(spec: str, workers: int) -> None:
    topology = build("topology", spec, TOPOLOGIES)
    assert isinstance(topology, Topology)
    found = places(topology, workers)
    for place in found:
        assert all(found[partner].active is not place.active for partner in place.partners)
        assert all(place.rank in found[partner].partners for partner in place.partners)
    assert unreached(workers, lambda worker: found[worker].partners) is None
    assert found[0].leads
    assert not found[0].active
    assert found[0].others == tuple(range(1, workers))


def test_a_ring_alternates() -> None:
    found = places(Ring(), 6)
    assert [place.active for place in found] == [False, True] * 3
    assert found[3].partners == (2, 4)


def test_an_odd_ring_loses_the_edge_between_two_passive_workers() -> None:
    assert [place.partners for place in places(Ring(), 5)] == [(1,), (0, 2), (1, 3), (2, 4), (3,)]


def test_a_star_asks_its_middle() -> None:
    found = places(Star(), 5)
    assert [place.active for place in found] == [False, True, True, True, True]
    assert found[0].partners == (1, 2, 3, 4)


def test_any_graph_keeps_a_path_between_all(tmp_path: Path) -> None:
    """Numbers of one color only are neighbors: colors go by the distance from worker 0."""
    path = tmp_path / "graph.txt"
    path.write_text("0 2\n2 4\n4 1\n1 3\n0 4\n")
    found = places(File(path=str(path)), 5)
    assert [place.active for place in found] == [False, False, True, True, True]
    assert unreached(5, lambda worker: found[worker].partners) is None


def test_partners_are_drawn_evenly_and_again_the_same() -> None:
    place = places(Complete(), 8)[3]
    drawn = [place.partner(step, absent=set()) for step in range(4000)]
    assert drawn == [place.partner(step, absent=set()) for step in range(4000)]
    for partner in (0, 2, 4, 6):
        assert 850 < drawn.count(partner) < 1150  # 1000 expected, deviation 27
    assert {place.partner(step, absent={0, 2}) for step in range(50)} == {4, 6}
    assert place.partner(1, absent={0, 2, 4, 6}) is None
