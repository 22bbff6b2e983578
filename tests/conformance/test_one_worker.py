"""One worker of any strategy is plain torch, bit for bit: same parameters as a loop that knows none of ours."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from conformance.jobs import (
    OPTIMIZERS,
    PARAMETERS,
    cuts_layers,
    make_job,
    named,
    plain_alone,
    plain_loop,
    plainly,
    played,
    sha256_of,
    simulated,
    strategies,
    strategy,
    vector_of,
    with_batch_norm,
)
from polyrhythm.errors import RequestError
from polyrhythm.specs import choices
from polyrhythm.training.flat_parameters import FlatParameters

OPTIMISERS = [
    *choices(OPTIMIZERS),
    "sgd(momentum=0, weight_decay=0.01)",
    "sgd(lr=0.1, nesterov=True)",
    "rmsprop(momentum=0.9, centered=True)",
    "adam(lr=0.01, amsgrad=True, weight_decay=0.01)",
    "tf1_rmsprop(momentum=0.9, weight_decay=0.0001)",
]


DTYPES = (torch.float32, torch.float64)
ALONE = [
    (spec, optimizer, DTYPES[(number + place) % 2])
    for number, spec in enumerate(plain_alone())
    for place, optimizer in enumerate(OPTIMISERS)
    if (number + place) % 3 == 0
]
"""Each strategy with a third of the optimizers, each optimizer with a third of the strategies, by turns in one dtype
and in the other: an optimizer's arithmetic does not depend on its caller."""


def by_hand(optimizer, dtype=torch.float32):
    return plainly(optimizer=optimizer, dtype=dtype, batch_size=8)


@pytest.mark.parametrize(("spec", "optimizer", "dtype"), ALONE, ids=str)
def test_one_worker_is_plain_torch(spec, optimizer, dtype):
    job = make_job(spec, optimizer=optimizer, dtype=dtype, batch_size=8)
    if cuts_layers(job):
        with pytest.raises(RequestError, match="looks at whole layers, and a server's shard cuts one"):
            simulated(job)
        return
    trained = simulated(job)
    found = vector_of(trained.models[0])
    assert found.dtype == dtype
    assert torch.equal(found, by_hand(optimizer, dtype))
    assert trained.sha256 == sha256_of(found)


def test_the_page_names_the_strategies_of_which_it_is_not_promised():
    page = (Path(__file__).parents[2] / "docs" / "reproducibility.md").read_text()
    (paragraph,) = (each for each in page.split("\n\n") if "differ from a plain torch loop" in each)
    others = {spec for spec in strategies() if "(" not in spec} - set(plain_alone())
    assert set(re.findall("`([a-z_]+)`", paragraph)) == others | {"mixed", "compress"}


def test_the_plain_loop_moves_every_parameter():
    job = make_job("synchronous")
    torch.manual_seed(job.learning.seed)
    start = vector_of(job.make_model())
    assert start.shape == (PARAMETERS,)
    assert (by_hand("sgd") != start).all()


@pytest.mark.parametrize("spec", plain_alone())
def test_one_worker_in_many_buckets(spec, monkeypatch):
    monkeypatch.setattr("polyrhythm.roles.replica.FlatParameters", partial(FlatParameters, bucket_bytes=16))
    trained = simulated(make_job(spec, batch_size=8))
    assert torch.equal(vector_of(trained.models[0]), by_hand("sgd"))


@pytest.mark.parametrize("spec", plain_alone())
def test_one_worker_with_batch_norm_and_a_ragged_batch(spec):
    job = make_job(spec, model=with_batch_norm)
    reference = plain_loop(job)
    found = simulated(job).models[0]
    assert torch.equal(vector_of(found), vector_of(reference))
    for name, value in reference.named_buffers():
        assert torch.equal(dict(found.named_buffers())[name], value), name


@pytest.mark.parametrize("spec", named(plain_alone()))
def test_steps_and_images_are_those_of_the_data(spec):
    result = played(spec).result
    assert (result["steps"], result["epochs"], result["workers"]) == (28, 2.0, 1)  # 53 images, batches of 4
    assert result["servers"] == strategy(spec).traits(1).servers
    assert set(result["staleness"]["histogram"]) == {"0"}
