"""What every strategy owes with several workers: agreement, repeatability, learning, and the dtype that it got."""

import re

import pytest
import torch

from conformance.jobs import (
    UNEVEN,
    agreeing,
    in_step,
    is_plain_alone,
    make_job,
    named,
    out_of_step,
    played,
    reads_newest,
    sha256_of,
    simulated,
    strategies,
    strategy,
    uneven,
    vector_of,
    with_dropout,
)
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.simulation.run import ConstantCluster


@pytest.fixture(scope="module")
def digits():
    return open_data("digits")


def test_in_step_and_out_of_step_are_told_apart():
    assert {"synchronous", "parameter_server(consistency=synchronous)", "mixed(replicas=3, servers=2)"} <= {
        *in_step(3)
    }
    assert {"parameter_server", "mixed", "mixed(replicas=1)"} <= {*out_of_step(3)}


@pytest.mark.parametrize(
    ("spec", "workers"), [(spec, count) for count in (2, 3, 5) for spec in agreeing(count)]
)
def test_replicas_agree_where_they_must(spec, workers):
    trained = played(spec, workers)
    vectors = [vector_of(model) for model in trained.models]
    assert len(vectors) == workers
    same = vectors
    if "compress" in spec and strategy(spec).traits(workers).servers:
        # In the end worker 0 takes what servers have, and others what has come of it.
        assert not torch.equal(vectors[0], vectors[1])
        same = vectors[1:]
    assert all(torch.equal(same[0], vector) for vector in same)
    assert trained.sha256 == sha256_of(vectors[0])


SERVED = [
    spec for spec in out_of_step(3) if strategy(spec).traits(1).servers and is_plain_alone(spec)
]  # whose workers have no parameters of their own


@pytest.mark.parametrize("spec", SERVED)
def test_out_of_step_worker_0_ends_with_what_the_servers_hold(spec):
    trained = played(spec, 3)
    quickest, middle, slowest = (vector_of(model) for model in trained.models)
    assert trained.sha256 == sha256_of(quickest)
    built = strategy(spec)
    if reads_newest(spec, 3):
        assert torch.equal(quickest, slowest)  # whose gradient was the last
    assert built.traits(3).gradients < 3 or not torch.equal(quickest, middle)


@pytest.mark.parametrize("spec", strategies())
def test_same_seed_same_trace(spec):
    first = played(spec, 3, model=with_dropout)
    second = simulated(make_job(spec, 3, model=with_dropout), UNEVEN)
    assert first.events == second.events
    other = simulated(make_job(spec, 3, model=with_dropout, seed=4), UNEVEN)
    assert other.sha256 != first.sha256


@pytest.mark.parametrize("spec", in_step(3))
def test_in_step_the_result_does_not_depend_on_timing(spec):
    # Of a pipeline the first stage takes longest here, and hides how slow the others are.
    first = strategy(spec).traits(3).pipelines
    slower = ConstantCluster(step_s=lambda worker: uneven(2 - worker)) if first else UNEVEN
    even, other = (played(spec, 3, around) for around in (ConstantCluster(), slower))
    assert even.sha256 == other.sha256
    assert even.result["seconds"] < other.result["seconds"]


@pytest.mark.parametrize("spec", strategies())
def test_dtype_is_kept(spec):
    trained = played(spec, 3, dtype=torch.float64)
    assert {value.dtype for model in trained.models for value in model.parameters()} == {torch.float64}
    assert trained.sha256 == sha256_of(vector_of(trained.models[0]))


@pytest.mark.parametrize("spec", strategies())
def test_every_gradient_is_counted_once(spec):
    workers = 3
    built = strategy(spec)
    histogram = played(spec, workers).result["staleness"]["histogram"]
    steps = 2 * 5  # 53 images, 12 a step
    applied = built.traits(workers).gradients
    traits = built.traits(workers)
    tellers = traits.shards or (
        1 if traits.servers else workers
    )  # without servers every worker tells its own
    assert sum(histogram.values()) == steps * applied * tellers
    if built.traits(workers).lockstep or applied == built.traits(workers).updates:
        assert (set(histogram) == {"0"}) == built.traits(workers).lockstep


LEARNING = [
    spec for spec in strategies() if spec in named([spec]) or "compress" in spec or "transfer" in spec
]


@pytest.mark.parametrize("spec", LEARNING)
def test_learns_with_the_defaults(spec, digits):
    job = make_job(
        spec,
        3,
        dataset=digits,
        epochs=digits.default_epochs,
        batch_size=64,
        seed=0,
        model=lambda: create_model("mlp", classes=10, image_shape=digits.image_shape),
    )
    assert simulated(job).result["test_top1"] >= 0.9


@pytest.mark.parametrize("spec", named(strategies()))
def test_more_servers_than_parameters_are_refused(spec):
    if not strategy(spec).traits(1).servers:
        with pytest.raises(RequestError, match=r"^unknown key of strategy|takes no keys"):
            strategy(f"{spec.partition('(')[0]}(servers=2)")
        return
    name = spec.partition("(")[0]
    with pytest.raises(
        RequestError, match="104 servers cannot share a model of 103 parameters: ask for at most 103"
    ):
        simulated(make_job(f"{name}(servers=104)", 2))


@pytest.mark.parametrize("spec", strategies())
def test_a_loss_that_is_not_finite_is_named(spec):
    with pytest.raises(RequestError) as caught:
        simulated(make_job(spec, 2, optimizer="sgd(lr=1e38)"))
    text = str(caught.value)
    assert "\n" not in text
    assert "the loss is nan at step" in text or "the loss is inf at step" in text
    assert re.search(r"learning rate [0-9.]+e\+3[78]:", text)  # where it has got to along its schedule
    assert "worker" in text
    assert "rank" in text
    assert "lower the learning rate" in text
