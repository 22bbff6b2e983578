"""A loop of one's own trains on several workers to what plain torch trains it to, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from unit.api.loop.loops import BATCH_SIZE, Loop, loader
from unit.api.loop.threads import run_in_threads
from unit.api.loop.tricks import EXACT, TRICKS
from unit.api.loop.variations import VARIATIONS, made, plain


def trained(variation: str, strategy: str, workers: int) -> tuple[list[Tensor], list[list[float]]]:
    """Return what each worker has trained and seen."""
    models = [made(variation) for _ in range(workers)]

    def train(group: Group) -> tuple[Tensor, list[float]]:
        with group:
            model, optimizer = group.distribute(*models[group.rank])
            loop = Loop(model, optimizer, group.shard(loader(BATCH_SIZE, group.workers)), group)
            VARIATIONS[variation](loop)
        return nn.utils.parameters_to_vector(model.parameters()).detach(), loop.seen

    found = run_in_threads(strategy, workers, train)
    return [vector for vector, _ in found], [seen for _, seen in found]


@pytest.mark.parametrize(
    ("variation", "workers"),
    [(each, 2 + number % 2) for number, each in enumerate(VARIATIONS)],
)
def test_a_synchronous_loop_is_the_plain_one(variation: str, workers: int) -> None:
    vectors, seen = trained(variation, "synchronous", workers)
    expected, observed = plain(variation, workers)
    exact = EXACT.get(variation, 1e-12)
    torch.testing.assert_close(vectors[0], expected, rtol=exact, atol=exact)
    assert all(torch.equal(vectors[0], each) for each in vectors)
    for each in seen:
        assert each == pytest.approx(observed, rel=exact, abs=exact)


IN_STEP = [
    "lazy_synchronous",
    "parameter_server(servers=2, consistency=synchronous)",
    "hierarchical(consistency=synchronous)",
    "mixed(replicas=1, consistency=synchronous)",
]


ON_SLICES = [each for each in VARIATIONS if each not in ("own_optimizer", "muon", "lbfgs")]
"""Those whose optimizers can run on a server's slice."""
NEEDS_MEAN = {"logs_norms"}


BY_MESSAGES = [each for each in IN_STEP if "(" in each]


@pytest.mark.parametrize(
    ("strategy", "variation", "workers"),
    # Each with 2 or 3 workers, and with one of three strategies whose gradients go in messages, by turns
    # (`LOOPS=all` of `test_every_strategy.py` takes every pair).
    [
        (strategy, variation, 2 + (at + number) % 2)
        for number, strategy in enumerate(IN_STEP)
        for at, variation in enumerate(ON_SLICES if strategy in BY_MESSAGES else ["clip_norm", "clamps"])
        if variation not in TRICKS and (strategy not in BY_MESSAGES or BY_MESSAGES.index(strategy) == at % 3)
    ]
    + [
        (BY_MESSAGES[at % len(BY_MESSAGES)], variation, 2 + at // len(BY_MESSAGES) % 2)
        for at, variation in enumerate(TRICKS)
    ],
)
def test_whoever_goes_in_step_is_the_plain_one(strategy: str, variation: str, workers: int) -> None:
    vectors, seen = trained(variation, strategy, workers)
    expected, observed = plain(variation, workers)
    exact = EXACT.get(variation, 1e-12)
    torch.testing.assert_close(vectors[0], expected, rtol=exact, atol=exact)
    if variation not in NEEDS_MEAN:
        for each in seen:
            assert each == pytest.approx(observed, rel=exact, abs=exact)
