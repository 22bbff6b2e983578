"""Ensembles: how they are written, and which runs their members are."""

from __future__ import annotations

import pytest

from polyrhythm.config.ensemble import Ensemble, refuse_distill
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError


@pytest.mark.parametrize(
    ("text", "members", "each"),
    [
        ("ensemble", 4, "synchronous"),
        ("ensemble(members=3)", 3, "synchronous"),
        ("ensemble(members=2, each=local_sgd(steps=8))", 2, "local_sgd(steps=8)"),
        (
            "ensemble(each='stages(\"synchronous until 0.5; local_sgd\")')",
            4,
            'stages("synchronous until 0.5; local_sgd")',
        ),
    ],
)
def test_ensembles_are_read_and_written(text: str, members: int, each: str) -> None:
    read = Ensemble.parse(text)
    assert read == Ensemble(members, each)
    assert Ensemble.parse(str(read)) == read


def test_other_strategies_are_none() -> None:
    assert Ensemble.parse("synchronous") is None
    assert Ensemble.parse("ensembles(members=3)") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ensemble(members=1)", r"2 to 1,000 members \(given 1\)"),
        ("ensemble(members=two)", "members"),
        ("ensemble(member=2)", "unknown key of strategy ensemble 'member'"),
        ("ensemble(each=ensemble)", "members of an ensemble are single networks"),
        ("ensemble(", "cannot read"),
    ],
)
def test_what_is_none_is_refused_in_a_line(text: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        Ensemble.parse(text)
    assert "\n" not in str(caught.value)


def test_members_are_runs_with_a_part_of_the_workers_and_seeds_of_their_own() -> None:
    config = configure({"workers": 6, "seed": 5, "device": "cuda,cuda,cpu,cpu,cpu,cpu", "distill": "mlp"})
    found = Ensemble(3, "d_psgd").member_configs(config)
    assert [(each.strategy, each.workers, each.seed) for each in found] == [
        ("d_psgd", 2, 5),
        ("d_psgd", 2, 6),
        ("d_psgd", 2, 7),
    ]
    assert [each.device for each in found] == ["cuda,cuda", "cpu,cpu", "cpu,cpu"]
    assert all(each.distill is None for each in found)


@pytest.mark.parametrize(("workers", "better"), [(2, 4), (7, 8), (5, 4)])
def test_workers_that_cannot_be_shared_out_are_refused_with_a_number_that_can(
    workers: int, better: int
) -> None:
    with pytest.raises(RequestError, match=f"{workers} workers .* 4 members: give --workers {better}$"):
        Ensemble(4).member_configs(configure({"workers": workers}))


def test_nothing_is_distilled_without_an_ensemble() -> None:
    with pytest.raises(RequestError, match="--distill is the last stage of an ensemble"):
        refuse_distill(configure({"distill": "mlp"}))
