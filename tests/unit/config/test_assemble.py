from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyrhythm.config.assemble import assemble, strategy_from
from polyrhythm.config.model import model_maker, name_of
from polyrhythm.config.recipe import configure
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.training.optimizers.adam import Adam
from polyrhythm.training.optimizers.sgd import SGD

TINY = {"data": "digits", "model": "mlp", "device": "cpu"}


def job(**values: Any) -> Job:
    return assemble(configure(TINY, values), CheckpointConfig())


def test_defaults_of_the_data_are_taken() -> None:
    made = job()
    assert made.learning.epochs == 30
    assert made.steps_per_epoch == -(-len(made.dataset.train) // (2 * 64))
    assert made.model_name == "mlp"


@pytest.mark.parametrize(
    ("strategy", "workers", "usual"),
    [
        ("synchronous", 4, SGD()),
        ("parameter_server", 4, SGD(lr=0.075, momentum=0)),
        ("parameter_server", 7, SGD(lr=0.0429, momentum=0)),
        ("parameter_server", 1, SGD()),
        ("parameter_server(consistency=synchronous)", 4, SGD()),
        ("mixed(replicas=2)", 4, SGD(lr=0.15, momentum=0)),
        ("staleness_aware", 4, SGD(lr=0.2, momentum=0)),
        ("softsync", 4, SGD()),
        ("mixed(merge=staleness_aware)", 4, SGD(lr=0.2, momentum=0)),
        ("mixed(merge=staleness_aware)", 2, SGD()),
        ("gaia(sites=2)", 4, SGD(lr=0.025)),
    ],
)
def test_late_gradients_share_a_rate_that_they_bear(strategy: str, workers: int, usual: SGD) -> None:
    assert job(strategy=strategy, workers=workers).learning.optimizer == usual


def test_a_given_optimizer_is_left_alone() -> None:
    assert job(strategy="parameter_server", optimizer="adam(lr=0.5)").learning.optimizer == Adam(lr=0.5)
    assert job(optimizer=Adam(lr=0.25)).learning.optimizer == Adam(lr=0.25)


@pytest.mark.parametrize("optimizer", [False, "", 0])
def test_an_empty_optimizer_is_not_the_default(optimizer: object) -> None:
    with pytest.raises(RequestError, match="optimizer: cannot read"):
        job(optimizer=optimizer)


@pytest.mark.parametrize("model", [3, None, [1], nn.Linear])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        job(model=model)


def test_a_module_is_copied_for_every_replica() -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    make_model = model_maker(own, open_data("digits"))
    first, second = make_model(), make_model()
    assert first is not own
    assert first[1].weight.data_ptr() != second[1].weight.data_ptr() != own[1].weight.data_ptr()
    assert torch.equal(first[1].weight, own[1].weight)


def test_replicas_of_a_name_are_equal_where_the_seed_is() -> None:
    make_model = model_maker("mlp", open_data("digits"))
    torch.manual_seed(3)
    first = make_model().state_dict()
    torch.manual_seed(3)
    second = make_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checking_a_request_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    job()
    assert torch.equal(torch.get_rng_state(), before)


def test_more_workers_than_images_are_refused() -> None:
    few = TensorSplit(torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]))
    pair = ((few.images(torch.arange(3)), few.labels), (few.images(torch.arange(3)), few.labels))
    assert job(data=pair, workers=3).workers == 3
    with pytest.raises(RequestError, match="4 workers cannot share 3 training images"):
        job(data=pair, workers=4)


def test_a_batch_is_prepared_ahead_where_it_is_work() -> None:
    assert job().ahead == 0
    assert job(augment="flip").ahead > 0


def test_names_for_people() -> None:
    assert name_of("mlp(hidden=[3])") == "mlp(hidden=[3])"
    assert name_of(nn.Linear(1, 1)) == "Linear"
    assert str(strategy_from("mixed( servers = 2 )")) == "mixed(servers=2)"
