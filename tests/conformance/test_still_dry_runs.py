"""Where nothing is computed, nobody copies, zeroes or looks at numbers; no strategy may tell the difference."""

from __future__ import annotations

import pytest
from torch import Tensor

from conformance.jobs import named, strategies, strategy, uneven
from polyrhythm.events import Notice
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.run import dry_events, program_of
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizers.sgd import SGD

SIZES = ModelSizes((300_000, 500_000), (0.4, 0.6))


def _zeros(worker: int, step: int, gradients: Tensor) -> None:
    gradients.zero_()


@pytest.mark.parametrize("spec", named(strategies()))
def test_events_are_those_of_a_dry_run_that_computes(spec: str) -> None:
    around = ConstantCluster(step_s=uneven, latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    still = DryRun(strategy=strategy(spec), workers=4, sizes=SIZES, steps=5)
    computing = DryRun(strategy=strategy(spec), workers=4, sizes=SIZES, steps=5, gradient=_zeros)
    assert still.computes_nothing
    assert not computing.computes_nothing
    events, others = dry_events(still, around), dry_events(computing, around)
    # only a run without values has to say that it has none
    events = [each for each in events if not (isinstance(each, Notice) and "has none" in each.text)]
    assert list(map(repr, events)) == list(map(repr, others))  # nobody knows a loss: not a number


def test_messages_are_handed_on_only_where_nothing_computes_and_nothing_goes_wrong() -> None:
    still = DryRun(strategy=strategy("ssp"), workers=2, sizes=SIZES, steps=2)
    updating = DryRun(strategy=strategy("ssp"), workers=2, sizes=SIZES, steps=2, optimizer=SGD(lr=0.1))
    copying = [program_of(still, faultless=False).received, program_of(updating).received]
    assert program_of(still).received not in copying
    assert copying[0] is copying[1]
