"""Every strategy with every compressor: it trains, or is refused in one line that says what to do."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from conformance.jobs import blobs, make_job, simulated, strategy, uneven, vector_of
from polyrhythm.compression.compressor import COMPRESSORS, Compressor
from polyrhythm.config.assemble import compressed
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import build, choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.strategy import Strategy
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)
STRATEGIES = [name for family in FAMILIES for name in choices(family)]
COMPRESSIBLE = [name for name in STRATEGIES if isinstance(strategy(name), Compressible)]


@pytest.mark.parametrize("name", sorted({*STRATEGIES} - {*COMPRESSIBLE}))
def test_what_cannot_be_compressed_says_why_and_what_can(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        compressed(strategy(name), "top_k")
    text = str(refused.value)
    assert text.startswith(f"compress: {name} cannot be compressed: ")
    assert "\n" not in text
    assert ": use " in text or ": leave compress out" in text
    for other in COMPRESSIBLE:
        if f"use {other}" in text:
            assert compressed(strategy(other), "top_k")


def test_no_two_families_give_the_same_reason_without_thinking() -> None:
    reasons = {type(strategy(name)).why_not_compressed for name in STRATEGIES if name not in COMPRESSIBLE}
    assert len(reasons) >= len(STRATEGIES) - len(COMPRESSIBLE) - 2


def refusal(built: Strategy) -> str:
    try:
        built.check(3)
    except RequestError as error:
        return str(error)
    return ""


@cache
def plain(name: str, optimizer: str) -> Tensor:
    job = make_job(name, 3, dataset=blobs(train=48), optimizer=optimizer, epochs=1)
    return vector_of(simulated(job, UNEVEN).models[0])


def built_of(name: str, kind: str) -> tuple[Compressor, Strategy]:
    made = build("compressor", f"{kind}(dense_below=0)", COMPRESSORS)
    assert isinstance(made, Compressor)
    return made, compressed(strategy(name), made)


TRIED = [
    (name, kind)
    for (number, name), (place, kind) in product(enumerate(COMPRESSIBLE), enumerate(choices(COMPRESSORS)))
    if (number + place) % 3 == 0 or refusal(built_of(name, kind)[1])
]
"""All that are refused, and of the others each strategy with a third of the compressors."""


@pytest.mark.parametrize(("name", "kind"), TRIED)
def test_it_trains_or_is_refused(name: str, kind: str) -> None:
    """Three uneven workers, 4 steps; small layers are compressed, too. Optimizers are those that it asks for."""
    made, built = built_of(name, kind)
    optimizer = "sgd(lr=0.01)" if made.own_momentum or made.votes else "sgd(lr=0.05, momentum=0.5)"
    text = refusal(built)
    if text:
        assert "\n" not in text
        assert kind in text or "compress" in text
        assert "use " in text or "leave " in text
        return
    job = make_job(str(built), 3, dataset=blobs(train=48), optimizer=optimizer, epochs=1)
    played = simulated(job, UNEVEN)
    for model in played.models:
        assert bool(vector_of(model).isfinite().all())
    whole = plain(name, optimizer)
    if kind == "sufficient_factors":  # exact
        torch.testing.assert_close(vector_of(played.models[0]), whole, rtol=0, atol=1e-5)
    elif kind != "power_sgd":  # whose rank is that of so small layers
        assert not torch.equal(vector_of(played.models[0]), whole)


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_with_everything_sent_it_is_the_uncompressed_strategy(name: str) -> None:
    """To rounding in float64; timing is the same, since links here take no time."""
    spec = "parameter_server(consistency=bounded_staleness(s=1))" if name == "ssp" else name
    built = compressed(strategy(spec), "top_k(density=1.0, dense_below=0)")
    if refusal(built):
        assert name in (
            "backup_workers",
            "dc_asgd",
        )  # drops what would have to be made up for; compares vectors
        return
    both = []
    for each in (spec, str(built)):
        job = make_job(
            each, 3, dataset=blobs(train=48), dtype=torch.float64, optimizer="sgd(lr=0.05, momentum=0.5)"
        )
        both.append([vector_of(model) for model in simulated(job, UNEVEN).models])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **REORDERED)
