"""What strategies cannot do with a network, an optimizer or a precision is refused before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from polyrhythm.api.simulate import laid_out
from polyrhythm.config.assemble import assemble
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.cluster import open_cluster


def assembled(**values: Any) -> Job:
    return assemble(
        RunConfig(**{"data": "digits", "model": "mlp", "workers": 2} | values), CheckpointConfig()
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"strategy": "hybrid", "optimizer": "lars"},
            "LARSOptimizer looks at whole layers, and hybrid parallelism cuts",
        ),
        (
            {"strategy": "hybrid", "optimizer": "ngsgd"},
            "NaturalGradientSGD looks at whole layers, and hybrid parallelism cuts",
        ),
        (
            {"strategy": "hybrid", "precision": "bfloat16"},
            "hybrid runs a network in parts, in full precision",
        ),
        ({"strategy": "hybrid", "compile": True}, "hybrid runs a network in parts, in full precision"),
        (
            {"strategy": "hybrid", "weight_average": 0.9},
            "hybrid has no whole model to average after each step",
        ),
        (
            {"strategy": "hybrid", "model": nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())},
            "does not end in fully connected layers",
        ),
        (
            {"strategy": "lazy_synchronous", "compile": True},
            "lazy_synchronous waits between the layers of the network, and a compiled one has none",
        ),
        (
            {"strategy": "eamsgd(delta=0.5)", "optimizer": "sgd(lr=0.1, momentum=0.9)"},
            "eamsgd has momentum delta=0.5, and the optimizer one of 0.9: give it momentum=0",
        ),
    ],
)
def test_it_is_refused_when_the_job_is_made(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError) as refused:
        assembled(**values)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "hybrid"},
        {"strategy": "hybrid", "workers": 1, "optimizer": "lars"},
        {"strategy": "hybrid", "workers": 1, "weight_average": 0.9},
        {"strategy": "lazy_synchronous"},
        {"strategy": "eamsgd(delta=0.5)", "optimizer": "sgd(lr=0.1, momentum=0.5)"},
        {"strategy": "eamsgd(delta=0.5)", "optimizer": "sgd(lr=0.1, momentum=0)"},
    ],
)
def test_what_can_be_done_is_not(values: dict[str, Any]) -> None:
    assert assembled(**values).numbers == 64 * 64 + 64 + 64 * 10 + 10


def test_shared_memory_over_several_hosts_is_refused_with_the_cluster() -> None:
    job = assembled(strategy="hogwild")
    with pytest.raises(
        RequestError, match="hogwild needs memory that all workers share, and they are on 2 hosts"
    ):
        laid_out(open_cluster("office"), job)
