"""Schedules against tables computed by hand."""

import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.training.schedule import RunLength
from polyrhythm.training.schedules.constant import Constant
from polyrhythm.training.schedules.cosine import Cosine
from polyrhythm.training.schedules.linear import Linear
from polyrhythm.training.schedules.step import Step

FOLDER = "polyrhythm.training.schedules"
RUN = RunLength(steps_per_epoch=4, epochs=2, global_batch=256)


def table(schedule, run=RUN):
    return [schedule.factor(step, run) for step in range(run.total_steps)]


def test_linear_table():
    assert table(Linear()) == [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert table(Linear(final=0.5)) == [1, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625]


def test_cosine_equals_torchs():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    rates = []
    for _ in range(8):
        rates += reference.get_last_lr()
        optimizer.step()
        reference.step()
    assert table(Cosine()) == pytest.approx(rates, rel=1e-12)


def test_step_table():
    assert table(Step()) == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert table(Step(at=[0.25], gamma=0.5)) == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_warm_up_rises_from_zero_per_step():
    assert table(Constant(warmup_epochs=1)) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert table(Constant(warmup_epochs=0.5)) == [0.5, 1, 1, 1, 1, 1, 1, 1]


def test_linear_and_cosine_run_over_what_the_warm_up_leaves():
    assert table(Linear(warmup_epochs=1)) == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    late = [1, 0.8535534, 0.5, 0.1464466]
    assert table(Cosine(warmup_epochs=1)) == pytest.approx([0.25, 0.5, 0.75, 1, *late], abs=1e-7)


def test_the_staircase_counts_the_whole_run():
    assert table(Step(warmup_epochs=1)) == pytest.approx([0.25, 0.5, 0.75, 1, 0.1, 0.1, 0.01, 0.01])


def test_linear_scaling_without_warm_up_is_immediate():
    assert table(Constant(reference_batch=64)) == [4.0] * 8
    assert table(Constant(reference_batch=512)) == [0.5] * 8


def test_linear_scaling_ramps_from_the_unscaled_rate():
    # Goyal and others: 0.1 at batch 256, to 0.1 * 8192 / 256 = 3.2 over five epochs, per iteration
    run = RunLength(steps_per_epoch=156, epochs=90, global_batch=8192)
    schedule = Step(at=[30 / 90, 60 / 90, 80 / 90], warmup_epochs=5, reference_batch=256)
    rates = {epoch: 0.1 * schedule.factor(round(epoch * 156), run) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80)}
    assert rates == pytest.approx({0: 0.1, 2.5: 1.65, 5: 3.2, 29.9: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032})
    ramp = [schedule.factor(step, run) for step in range(781)]
    assert ramp == pytest.approx([1 + 31 * step / 780 for step in range(781)])


def test_a_batch_below_the_reference_is_scaled_at_once():
    assert table(Constant(warmup_epochs=1, reference_batch=512)) == [0.5] * 8
    assert table(Constant(warmup_epochs=1, reference_batch=256)) == [1.0] * 8


@pytest.mark.parametrize(("schedule", "last"), [(Linear(final=0.25), 0.25), (Cosine(), 0.0), (Step(), 0.01)])
def test_beyond_the_end_the_last_value_stays(schedule, last):
    assert schedule.factor(8, RUN) == pytest.approx(last)
    assert schedule.factor(1000, RUN) == pytest.approx(last)


@pytest.mark.parametrize("name", choices(FOLDER))
def test_the_warm_up_may_fill_the_run_but_not_more(name):
    schedule = build("schedule", f"{name}(warmup_epochs=2)", FOLDER)
    assert schedule.factor(0, RUN) == 0.125
    longer = build("schedule", f"{name}(warmup_epochs=2.5)", FOLDER)
    with pytest.raises(
        RequestError, match=rf"schedule {name}: warmup_epochs=2.5 is longer than the run; .* 2 at most"
    ):
        longer.factor(0, RUN)


@pytest.mark.parametrize(
    "spec",
    [
        "cosine(warmup_epochs=1.0, final=0.1)",
        "step(at=[0.25, 0.5], gamma=0.2)",
        "constant(reference_batch=64)",
    ],
)
def test_a_spec_survives_text(spec):
    config = build("schedule", spec, FOLDER)
    assert build("schedule", str(config), FOLDER) == config


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("step(at=[0.5, 1.0])", "at.1 should be less than 1"),
        ("step(at=[])", "at .*at least 1 item"),
        ("step(gamma=0)", "gamma should be greater than 0"),
        ("cosine(final=1.5)", "final should be less than or equal to 1"),
        ("linear(final=-0.1)", "final should be greater than or equal to 0"),
        ("constant(warmup_epochs=-1)", "warmup_epochs should be greater than or equal to 0"),
        ("constant(reference_batch=0)", "reference_batch should be greater than or equal to 1"),
        ("constant(reference_batch=True)", "reference_batch should be a number"),
        ("cosin", "did you mean cosine"),
    ],
)
def test_refuses_values_out_of_range(spec, message):
    with pytest.raises(RequestError, match=message):
        build("schedule", spec, FOLDER)
