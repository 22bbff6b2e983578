"""SGP's part: sums and masses are kept, and the ratio is right where x alone is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyrhythm.specs import choices
from polyrhythm.strategies.gossip.sgp import SGP
from polyrhythm.strategies.topologies.file import File
from polyrhythm.strategies.topologies.one_peer_exponential import OnePeerExponential
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topology import TOPOLOGIES
from unit.strategies.gossip.parts import Played, play, whole_numbers


def irregular(folder: Path) -> File:
    """Gives a graph in which worker 0 hears all others, and is heard by one."""
    path = folder / "irregular.txt"
    path.write_text("0 1\n1 2\n2 3\n3 0\n1 0\n2 0\n")
    return File(path=str(path), directed=True)


def states(played: Played) -> list[tuple[torch.Tensor, float]]:
    """Gives x and a of every worker."""
    found = [part.state() for part in played.parts]
    return [(tensors["numerator"], facts["mass"]) for tensors, facts in found]


@pytest.mark.parametrize("overlap", [False, True])
def test_sums_and_masses_are_kept_on_an_irregular_graph(overlap: bool, tmp_path: Path) -> None:
    starts = whole_numbers(4)
    played = play(SGP(topology=irregular(tmp_path), overlap=overlap), starts, 5)
    whole = states(played)
    torch.testing.assert_close(
        sum(x for x, _ in whole), starts.sum(0)
    )  # end() has taken in what was under way
    assert sum(a for _, a in whole) == pytest.approx(4)
    assert {round(a, 6) for _, a in whole} != {1.0}
    torch.testing.assert_close(played.ends[0], starts.mean(0))


def test_the_ratio_finds_the_mean_where_x_alone_does_not(tmp_path: Path) -> None:
    starts = whole_numbers(4)
    played = play(SGP(topology=irregular(tmp_path)), starts, 60)
    for vectors in played.vectors:
        torch.testing.assert_close(vectors[-1], starts.mean(0), rtol=1e-6, atol=1e-3)
    astray = max(float((x - starts.mean(0)).abs().max()) for x, _ in states(played))
    assert astray > 1000


@pytest.mark.parametrize(
    "spec", ["ring", "exponential", "one_peer_exponential", "complete", "random_regular"]
)
def test_on_regular_graphs_all_masses_stay_one(spec: str) -> None:
    starts = whole_numbers(4)
    played = play(SGP(topology=choices(TOPOLOGIES)[spec]()), starts, 4)
    for vectors, (x, a) in zip(played.vectors, states(played), strict=True):
        assert a == pytest.approx(1, abs=1e-15)
        torch.testing.assert_close(vectors[-1], x, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("workers", "turns"), [(2, 1), (4, 2), (8, 3)])
def test_one_peer_a_turn_gives_everybody_the_mean_to_the_bit(workers: int, turns: int) -> None:
    starts = whole_numbers(workers)
    played = play(SGP(topology=OnePeerExponential()), starts, turns)
    for vectors in played.vectors:
        assert torch.equal(vectors[-1], starts.mean(0))


def test_the_gradient_goes_before_the_push() -> None:
    starts, gradients = whole_numbers(2), whole_numbers(2, seed=5)
    played = play(SGP(), starts, 1, lambda worker, step: gradients[worker])
    for vectors in played.vectors:
        assert torch.equal(vectors[0], (starts - gradients).mean(0))


def test_overlapped_pushes_count_a_step_later() -> None:
    """By hand, two workers: x = [8, 16], no gradients. Half stays; the other half comes with the next step."""
    starts = torch.tensor([[8.0] * 6, [16.0] * 6], dtype=torch.float64)
    played = play(SGP(overlap=True), starts, 2)
    assert [vectors[0][0].item() for vectors in played.vectors] == [8, 16]
    # x = 4/2 + 8, a = 1/2/2 + 1/2 at worker 0
    assert played.vectors[0][1][0].item() == pytest.approx((2 + 8) / 0.75)
    assert played.vectors[1][1][0].item() == pytest.approx((4 + 4) / 0.75)
    assert played.ends[0][0].item() == 12


def test_overlap_hides_the_link() -> None:
    """A message takes 9 ms on the wire, a step 10 ms: hidden, but for the last and the mean at the end."""
    starts = whole_numbers(3)
    without, hidden = (
        play(SGP(topology=Ring(), overlap=overlap), starts, 20, bytes_per_s=2.5e4).seconds
        for overlap in (False, True)
    )
    assert hidden < 20 * 0.01 + 0.05
    assert without - hidden > 19 * 0.008
