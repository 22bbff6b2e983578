"""What every strategy must do with every loop: train as stated, or refuse in one line; a new one is found by itself.

Each strategy takes a few of the variations, others for each; `LOOPS=all` takes the whole product (10 minutes):

    LOOPS=all python -m pytest tests/unit/api/loop/test_every_strategy.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from polyrhythm.errors import RequestError
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES
from unit.api.loop.loops import BATCH_SIZE, Loop, loader
from unit.api.loop.test_faithful_loops import ON_SLICES
from unit.api.loop.threads import run_in_threads
from unit.api.loop.tricks import EXACT
from unit.api.loop.variations import VARIATIONS, made, plain

WORKERS = 2
KNOWN = {name: kind for family in FAMILIES for name, kind in choices(family).items()}
EACH = len(VARIATIONS) if os.environ.get("LOOPS") == "all" else 2
PAIRS = [
    (name, [*VARIATIONS][(number * 5 + 11 * turn) % len(VARIATIONS)])
    for number, name in enumerate(KNOWN)
    for turn in range(len(VARIATIONS))
    if turn < EACH
]


@pytest.mark.parametrize(("strategy", "variation"), PAIRS)
def test_a_loop_trains_as_stated_or_is_refused(strategy: str, variation: str) -> None:
    traits = KNOWN[strategy]().traits(WORKERS)  # type: ignore[attr-defined]
    networks = [made(variation) for _ in range(WORKERS)]

    def train(group: Group) -> Tensor:
        with group:
            model, optimizer = group.distribute(*networks[group.rank])
            batches = group.shard(loader(BATCH_SIZE, group.workers))
            VARIATIONS[variation](Loop(model, optimizer, batches, group))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    in_step = traits.identical and traits.exchange_every == 1 and not traits.skips_steps
    try:
        first, *others = run_in_threads(strategy, WORKERS, train)
    except RequestError as error:
        refused = str(error)
    else:
        assert all(torch.equal(first, each) for each in others)
        assert bool(first.isfinite().all())
        if in_step:
            exact = EXACT.get(variation, 1e-12)
            torch.testing.assert_close(first, plain(variation, WORKERS)[0], rtol=exact, atol=exact)
        return
    assert "\n" not in refused
    assert not in_step or variation not in ON_SLICES, refused
