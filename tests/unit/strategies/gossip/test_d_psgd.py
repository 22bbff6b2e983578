"""D-PSGD's part: what mixing keeps, and what it shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.gossip.d_psgd import DPSGD
from polyrhythm.strategies.topologies.complete import Complete
from polyrhythm.strategies.topologies.file import File
from polyrhythm.strategies.topologies.one_peer_exponential import OnePeerExponential
from polyrhythm.strategies.topologies.ring import Ring
from unit.strategies.gossip.parts import play, whole_numbers


@pytest.mark.parametrize("topology", [Complete(), OnePeerExponential()], ids=str)
def test_without_gradients_the_mean_is_kept_to_the_bit(topology: Complete) -> None:
    """Weights are 1/4 or 1/2, and all sums are exact."""
    starts = whole_numbers(4)
    played = play(DPSGD(topology=topology), starts, 3)
    for step in range(3):
        now = torch.stack([vectors[step] for vectors in played.vectors])
        assert torch.equal(now.sum(0), starts.sum(0))
    assert torch.equal(played.ends[0], starts.mean(0))


def test_without_gradients_differences_shrink_by_the_spectral_gap() -> None:
    starts = whole_numbers(5)
    played = play(DPSGD(), starts, 6)
    rate = Ring().rate(5)
    before = starts.var(0)
    for step in range(6):
        now = torch.stack([vectors[step] for vectors in played.vectors])
        torch.testing.assert_close(now.mean(0), starts.mean(0))
        assert (now.var(0) <= rate**2 * before * (1 + 1e-9)).all()
        before = now.var(0)


def test_the_gradient_is_added_after_the_mixing() -> None:
    starts = whole_numbers(3)
    gradients = whole_numbers(3, seed=2)
    played = play(DPSGD(topology=Ring()), starts, 1, lambda worker, step: gradients[worker])
    found = torch.stack([vectors[0] for vectors in played.vectors])
    torch.testing.assert_close(found, starts.mean(0) - gradients)


def test_weights_that_move_the_mean_are_refused_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("0 1\n0 2\n1 2\n2 0\n")
    strategy = DPSGD(topology=File(path=str(path), directed=True))
    with pytest.raises(
        RequestError,
        match=r"d_psgd: the weights of worker 0 .* sum to 0\.833333, not 1, .* use sgp\(topology=file\(",
    ):
        strategy.check(3)
    build("strategy", f"sgp(topology=file(path='{path}', directed=True))", *FAMILIES).check(3)  # type: ignore[attr-defined]


def test_the_gap_is_told() -> None:
    assert (
        DPSGD().remark(8) == "ring of 8 workers: spectral gap 0.1953, at most 2 messages of a worker a step"
    )
    assert DPSGD(topology=OnePeerExponential()).remark(8) == (
        "one_peer_exponential of 8 workers: spectral gap 1, at most 1 message of a worker a step"
    )
    assert DPSGD().remark(1) == ""
