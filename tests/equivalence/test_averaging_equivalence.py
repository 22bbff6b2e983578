"""Averaging strategies are each other, and synchronous or plain training, where their rules say so."""

import pytest
import torch

from conformance.jobs import make_job, plain_loop, played, simulated, vector_of
from tolerances import REORDERED

EVEN = 48  # images: all batches are full
STEPS = 8  # of 3 workers: 4 an epoch


def trained(spec, workers=3, **options):
    return vector_of(played(spec, workers, **options).models[0])


def far_apart(one, other):
    return (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("at_average", ["keep", "average"])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_a_mean_at_every_step_is_synchronous(momentum, at_average):
    options = {"dtype": torch.float64, "train": EVEN, "optimizer": f"sgd(momentum={momentum})"}
    local = trained(f"local_sgd(steps=1, optimizer_state={at_average})", **options)
    torch.testing.assert_close(local, trained("synchronous", **options), **REORDERED)


def test_a_mean_at_every_step_is_not_synchronous_with_adam():
    options = {"dtype": torch.float64, "train": EVEN, "optimizer": "adam(lr=0.01)"}
    assert far_apart(trained("local_sgd(steps=1)", **options), trained("synchronous", **options))


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
def test_local_sgd_of_one_round_is_parallel_sgd(optimizer):
    options = {"optimizer": optimizer, "train": EVEN}
    once = trained("parallel_sgd", **options)
    assert torch.equal(trained(f"local_sgd(steps={STEPS})", **options), once)
    assert torch.equal(trained(f"local_sgd(steps={STEPS + 5})", **options), once)  # the last round is shorter
    assert far_apart(trained(f"local_sgd(steps={STEPS // 2})", **options), once)


def test_post_local_sgd_is_local_from_the_start_or_synchronous_to_the_end():
    assert torch.equal(trained("post_local_sgd(after=0, steps=3)"), trained("local_sgd(steps=3)"))
    assert torch.equal(trained("post_local_sgd(after=1000, steps=3)"), trained("synchronous"))
    half, as_steps = (trained(f"post_local_sgd(after={after}, steps=3)") for after in (0.5, 5))
    assert torch.equal(half, as_steps)  # of 10 steps
    assert far_apart(half, trained("synchronous"))


def test_groups_of_one_size_that_meet_whenever_all_do_are_local_sgd():
    options = {"dtype": torch.float64, "train": EVEN}
    inside = trained("hierarchical_averaging(group=2, steps=2, steps_between=100)", 4, **options)
    pairs = [trained("local_sgd(steps=100)", 4, **options), inside]
    assert far_apart(*pairs)
    whole = trained("hierarchical_averaging(group=4, steps=2, steps_between=100)", 4, **options)
    assert torch.equal(whole, trained("local_sgd(steps=2)", 4, **options))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_block_momentum_of_nothing_is_local_sgd(optimizer, nesterov):
    spec = f"bmuf(steps=3, block_momentum=0, nesterov={nesterov})"
    assert torch.equal(trained(spec, optimizer=optimizer), trained("local_sgd(steps=3)", optimizer=optimizer))


@pytest.mark.parametrize(
    "spec",
    [
        "slowmo(steps=3, slow_momentum=0, optimizer_state=keep)",
        "diloco(steps=3, outer=sgd(lr=1, momentum=0))",
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_outer_steps_to_the_mean_are_local_sgd(spec, optimizer):
    options = {"dtype": torch.float64, "optimizer": optimizer}
    torch.testing.assert_close(
        trained(spec, **options), trained("local_sgd(steps=3)", **options), **REORDERED
    )


def test_slowmo_with_a_constant_rate_is_classical_block_momentum():
    options = {"dtype": torch.float64, "schedule": "constant"}
    slow = trained("slowmo(steps=3, slow_momentum=0.7, slow_lr=0.9, optimizer_state=keep)", **options)
    block = trained("bmuf(steps=3, block_momentum=0.7, block_lr=0.9)", **options)
    torch.testing.assert_close(slow, block, **REORDERED)


def test_one_worker_of_diloco_is_plain_training_only_with_an_outer_step_to_the_mean():
    job = make_job("diloco(steps=3, outer=sgd(lr=1, momentum=0))", dtype=torch.float64, optimizer="adam")
    plain = vector_of(plain_loop(job))
    found = vector_of(simulated(job).models[0])
    torch.testing.assert_close(found, plain, **REORDERED)
    assert far_apart(trained("diloco(steps=3)", 1, dtype=torch.float64, optimizer="adam"), plain)


def test_an_optimizer_of_any_kind_may_be_the_outer_one():
    assert torch.isfinite(trained("diloco(steps=3, outer=adam(lr=0.01))")).all()
    assert far_apart(trained("diloco(steps=3, outer=adam(lr=0.01))"), trained("diloco(steps=3)"))
