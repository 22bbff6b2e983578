"""Workers that push something else than their gradients: the mean fails, and robust aggregators do not."""

from __future__ import annotations

from functools import cache
from math import isfinite
from random import Random
from statistics import NormalDist
from typing import Any

import pytest
import torch

from conformance.jobs import make_job, result_of
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.models.create import create_model
from polyrhythm.simulation.injection.adversaries.little_is_enough import LittleIsEnough
from polyrhythm.simulation.injection.adversary import ADVERSARIES
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.specs import choices
from tolerances import REORDERED
from unit.simulation.clusters import cluster

WORKERS = 11
ROBUST = {
    "krum(f=2)": ("sign_flip", "nan"),
    "multi_krum(f=2)": ("random", "little_is_enough"),
    "bulyan(f=2)": ("nan", "little_is_enough"),
    "coordinate_median(f=2)": ("sign_flip", "nan"),
    "trimmed_mean(k=2)": ("sign_flip", "random"),
}
"""Each against two of eleven, which is as many as Bulyan bears; it asks for 4f + 3."""


def trained(aggregator: str, faults: Any = ()) -> float:
    """Trains on digits, and gives the share of test images that are told right."""
    data = open_data("digits")
    job = make_job(
        f"parameter_server(servers=2, consistency=synchronous, aggregator={aggregator})",
        WORKERS,
        dataset=data,
        epochs=24,
        batch_size=48,
        optimizer="sgd(lr=0.2)",
        model=lambda: create_model("mlp", classes=10, image_shape=data.image_shape),
    )
    where = cluster({"count": WORKERS + 2, "cores": 4}, faults=faults)
    layout = lay_out(where, WORKERS, 2, job.strategy.traits(WORKERS).placement)
    events: list[Event] = []
    simulate_on(layout, job, events.append)
    return float(result_of(events)["test_top1"])


def attacked_by(*attacks: str) -> str:
    return "; ".join(f"byzantine(rank={3 + 4 * place}, attack={name})" for place, name in enumerate(attacks))


@cache
def clean() -> float:
    return trained("weighted_mean")


def test_without_adversaries_it_learns() -> None:
    assert clean() > 0.9


@pytest.mark.parametrize("aggregator", ROBUST)
def test_robust_aggregators_bear_two_of_eleven(aggregator: str) -> None:
    assert trained(aggregator, attacked_by(*ROBUST[aggregator])) >= clean() - 0.02


def test_bulyan_bears_two_that_look_at_each_others_gradients() -> None:
    faults = "byzantine(rank=3, allies=[7], attack=little_is_enough)"
    assert trained("bulyan(f=2)", faults) >= clean() - 0.02


def test_allies_attack_alike_though_they_do_not_collude() -> None:
    assert trained("weighted_mean", "byzantine(rank=3, allies=[7], attack=sign_flip)") < clean() - 0.2


def test_the_mean_fails_with_one_of_eleven() -> None:
    assert trained("weighted_mean", attacked_by("sign_flip(scale=20)")) < clean() - 0.2


def test_the_mean_fails_with_one_that_sends_no_numbers() -> None:
    with pytest.raises(RequestError, match="the loss is nan at step"):
        trained("weighted_mean", attacked_by("nan"))


@pytest.mark.parametrize("attack", list(choices(ADVERSARIES)))
def test_the_same_seed_attacks_alike(attack: str) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(3, 5)
    [fault] = parse_faults(f"byzantine(rank=1, attack={attack})")
    kept = gradients.clone()
    results = []
    for _ in range(2):
        made, random = fault.attack.attack(), Random(7)  # type: ignore[attr-defined]
        results.append(torch.stack([made(gradient, random) for gradient in gradients]))
    assert results[0].shape == gradients.shape
    assert torch.equal(results[0], results[1]) or results[0].isnan().all()
    assert torch.equal(gradients, kept)


def test_a_little_is_enough_stays_within_what_honest_gradients_differ_by() -> None:
    generator = torch.Generator().manual_seed(1)
    honest = torch.randn(2000, 4, generator=generator, dtype=torch.float64) * 2 + 5
    attack, random = LittleIsEnough(z=1.5).attack(), Random(0)
    for gradient in honest:
        found = attack(gradient, random)
    expected = honest.mean(0) - 1.5 * honest.std(0, correction=0)
    torch.testing.assert_close(found, expected, **REORDERED)
    assert (found > 5 + 2 * NormalDist().inv_cdf(0.05)).all()


@pytest.mark.parametrize(
    ("spec", "fault", "complaint"),
    [
        ("parameter_server", "byzantine(rank=9)", "there is no rank 9; ranks are 0 to 3"),
        ("parameter_server", "byzantine(rank=3)", "rank 3 is a server, which pushes no gradients"),
        ("synchronous", "byzantine(rank=1)", "there is no server to push to"),
    ],
)
def test_who_cannot_be_an_adversary_is_told_in_one_line(spec: str, fault: str, complaint: str) -> None:
    job = make_job(spec, 3)
    layout = lay_out(cluster({"count": 4, "cores": 4}), 3, job.traits.servers, job.traits.placement)
    [made] = parse_faults(fault)
    with pytest.raises(RequestError, match=complaint):
        made.check(layout)


@pytest.mark.parametrize("servers", [1, 2])
def test_asynchronous_servers_let_one_go_that_sends_no_numbers(servers: int) -> None:
    spec = f"parameter_server(servers={servers}, consistency=asynchronous, eject_after=3)"
    job = make_job(spec, 3, epochs=6, batch_size=6, optimizer="sgd(lr=0.01)")
    where = cluster({"count": 3 + servers, "cores": 4}, faults="byzantine(rank=2, attack=nan)")
    layout = lay_out(where, 3, servers, job.strategy.traits(3).placement)
    events: list[Event] = []
    simulate_on(layout, job, events.append)
    result = result_of(events)
    assert result["gradients_not_finite"] >= 3
    assert result["workers_ejected"] >= 1
    assert result["workers_lost"] == 1
    assert isfinite(result["test_loss"])
