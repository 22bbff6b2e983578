"""Features of pictures: those of the network, computed by several processes, once."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.data.dataset import Part, TensorSplit
from polyrhythm.data.seeding import sample_keys
from polyrhythm.errors import RunError
from polyrhythm.evaluation import feature_cache
from polyrhythm.evaluation.feature_cache import Request, compute

SHAPE = (1, 8, 8)


def network(folder: str = "", deaths: int = 0) -> nn.Module:
    """Return the same network always; processes die, until so many have."""
    if deaths and os.getpid() != int(Path(folder, "parent").read_text()):
        died = len(list(Path(folder).glob("death-*")))
        if died < deaths:
            Path(folder, f"death-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3))


def darker(images: Tensor, keys: Tensor) -> Tensor:
    return images * (keys % 7)[:, None, None, None].float()


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "parent").write_text(str(os.getpid()))
    images = torch.randn(50, *SHAPE, generator=torch.Generator().manual_seed(0))

    def make(deaths: int = 0, **changes: Any) -> Request:
        made = {
            "make_model": partial(network, str(tmp_path), deaths),
            "split": TensorSplit(images, torch.arange(50) % 3),
            "image_shape": SHAPE,
            "views": 2,
            "transform": darker,
            "seed": 5,
            "device": torch.device("cpu"),
        }
        return Request(**(made | changes))

    return make


def expected(images: Tensor, seed: int = 5) -> Tensor:
    body = network()[:3]
    keys = sample_keys("transform", seed, 1, torch.arange(len(images)))
    with torch.no_grad():
        return torch.stack([body(images), body(darker(images, keys))])


def test_features_are_the_bodys_and_are_computed_once(
    request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of()
    everything = request.split.images(torch.arange(50))
    torch.testing.assert_close(compute(request, 2, start_method="fork"), expected(everything))

    def never(*given: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(feature_cache, "_compute_in", never)
    torch.testing.assert_close(compute(request, 1), expected(everything))
    for other in (
        request_of(seed=6),
        request_of(views=3),
        request_of(split=Part(request.split, torch.arange(9))),
    ):
        with pytest.raises(AssertionError, match="computed again"):
            compute(other, 1)


def test_a_process_that_dies_is_started_again(request_of: Any) -> None:
    request = request_of(deaths=2)
    everything = request.split.images(torch.arange(50))
    torch.testing.assert_close(compute(request, 2, start_method="fork"), expected(everything))


def test_one_that_dies_always_ends_the_run(request_of: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="died 3 times"):
        compute(request_of(deaths=99), 1, start_method="fork")
    assert not list((tmp_path / "polyrhythm" / "features").iterdir())


def test_the_oldest_features_go(request_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute(request_of(), 1, start_method="fork")
    monkeypatch.setattr(feature_cache, "_MOST_BYTES", 4000)
    compute(request_of(seed=9), 1, start_method="fork")
    assert len(list((tmp_path / "polyrhythm" / "features").glob("*.npy"))) == 1
