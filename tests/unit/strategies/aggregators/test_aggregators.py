"""The aggregators against brute force in plain Python, and the properties that all robust ones share."""

from __future__ import annotations

import itertools
from statistics import fmean, median

import pytest
import torch
from torch import Tensor

from conformance.jobs import strategy
from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.strategies.aggregator import AGGREGATORS, Aggregator, mean, squared_distances

ROBUST = [name for name in choices(AGGREGATORS) if name != "weighted_mean"]


def aggregator(spec: str) -> Aggregator:
    built = build("aggregator", spec, AGGREGATORS)
    assert isinstance(built, Aggregator)
    return built


def aggregated(spec: str, gradients: list[Tensor], weights: list[float] | None = None) -> Tensor:
    made = aggregator(spec)
    distances = squared_distances(gradients) if made.whole else None
    return made.aggregate(gradients, weights or [1.0] * len(gradients), distances)


def gradients_of(count: int, seed: int = 0, numbers: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, numbers, generator=generator, dtype=torch.float64))


def krum_by_hand(vectors: list[list[float]], among: list[int], f: int) -> int:
    """Gives the position of the least score; of equal ones, the one that is nearer to all."""
    scores = {}
    for one in among:
        away = [
            sum((a - b) ** 2 for a, b in zip(vectors[one], vectors[j], strict=True))
            for j in among
            if j != one
        ]
        scores[one] = sum(sorted(away)[: max(0, len(among) - f - 2)]), sum(away)
    return min(among, key=lambda one: scores[one])


@pytest.mark.parametrize(("count", "f"), [(5, 1), (6, 1), (7, 2), (9, 3), (4, 0)])
@pytest.mark.parametrize("seed", range(5))
def test_krum_is_the_brute_force_choice_and_one_of_its_inputs(count: int, f: int, seed: int) -> None:
    gradients = gradients_of(count, seed)
    by_hand = krum_by_hand([g.tolist() for g in gradients], list(range(count)), f)
    assert torch.equal(aggregated(f"krum(f={f})", gradients), gradients[by_hand])


def test_of_equal_scores_krum_takes_the_first_as_its_paper_does() -> None:
    # The two nearest of three have one score; the second of them is nearer to the third.
    gradients = [torch.tensor([value], dtype=torch.float64) for value in (0.0, 1.0, 3.0)]
    assert aggregated("krum(f=0)", gradients).item() == 0
    assert aggregated("krum(f=0)", gradients[::-1]).item() == 1


@pytest.mark.parametrize("m", [1, 2, 4])
def test_multi_krum_is_the_mean_of_the_best(m: int) -> None:
    gradients = gradients_of(7, seed=3)
    vectors = [g.tolist() for g in gradients]
    scores = []
    for one in range(7):
        away = sorted(
            sum((a - b) ** 2 for a, b in zip(vectors[one], vectors[j], strict=True))
            for j in range(7)
            if j != one
        )
        scores.append((sum(away[:4]), one))
    best = [one for _, one in sorted(scores)[:m]]
    expected = [fmean(vectors[one][k] for one in best) for k in range(5)]
    assert aggregated(f"multi_krum(f=1, m={m})", gradients).tolist() == pytest.approx(expected, rel=1e-12)
    if m == 1:
        assert torch.equal(aggregated("multi_krum(f=1, m=1)", gradients), aggregated("krum(f=1)", gradients))
    if m == 4:  # n - f - 2
        assert torch.equal(
            aggregated("multi_krum(f=1)", gradients), aggregated("multi_krum(f=1, m=4)", gradients)
        )


@pytest.mark.parametrize(("count", "f"), [(7, 1), (8, 1), (11, 2), (3, 0)])
def test_bulyan_is_the_brute_force_choice(count: int, f: int) -> None:
    gradients = gradients_of(count, seed=count)
    vectors, left, chosen = [g.tolist() for g in gradients], list(range(count)), []
    while len(chosen) < count - 2 * f:
        chosen.append(krum_by_hand(vectors, left, f))
        left.remove(chosen[-1])
    expected = []
    for k in range(5):
        values = sorted(vectors[one][k] for one in chosen)
        middle = median(values)
        expected.append(fmean(sorted(values, key=lambda value: abs(value - middle))[: count - 4 * f]))
    assert aggregated(f"bulyan(f={f})", gradients).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("count", [3, 4, 7, 8])
def test_the_median_of_an_even_number_is_the_mean_of_the_two_in_the_middle(count: int) -> None:
    gradients = gradients_of(count, seed=1)
    expected = [median(float(g[k]) for g in gradients) for k in range(5)]
    found = aggregated("coordinate_median", gradients)
    assert found.tolist() == pytest.approx(expected, rel=1e-15)
    lower = torch.stack(gradients).median(dim=0).values  # torch's own takes the lower one
    assert torch.equal(found, lower) == (count % 2 == 1)


@pytest.mark.parametrize(("count", "k"), [(3, 1), (5, 2), (8, 2)])
def test_the_trimmed_mean_by_hand(count: int, k: int) -> None:
    gradients = gradients_of(count, seed=2)
    expected = [fmean(sorted(float(g[i]) for g in gradients)[k : count - k]) for i in range(5)]
    assert aggregated(f"trimmed_mean(k={k})", gradients).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_trimmed_mean_of_k_0_has_the_bits_of_the_mean() -> None:
    gradients = [g.float() for g in gradients_of(7, numbers=101)]
    assert torch.equal(aggregated("trimmed_mean(k=0)", gradients), aggregated("weighted_mean", gradients))
    assert torch.equal(aggregated("weighted_mean", gradients), mean(gradients))


def test_the_weighted_mean_counts_samples_and_looks_at_nothing_that_weighs_nothing() -> None:
    gradients = [torch.tensor([4.0]), torch.tensor([float("nan")]), torch.tensor([1.0])]
    assert aggregated("weighted_mean", gradients, [1.0, 0.0, 0.5]).tolist() == [3.0]


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("wrong", [1e30, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("places", [(0, 1), (5, 10), (9, 10)])
def test_identical_gradients_win_against_f_outliers_exactly(
    name: str, wrong: float, places: tuple[int, int]
) -> None:
    """n = 11 = 4f + 3 is enough for all, f = 2."""
    honest = torch.tensor([0.5, -1.25, 3.0])
    gradients = [torch.full((3,), wrong) if place in places else honest for place in range(11)]
    key = "k" if name == "trimmed_mean" else "f"
    assert torch.equal(aggregated(f"{name}({key}=2)", gradients), honest)


@pytest.mark.parametrize("name", ROBUST)
def test_what_is_not_finite_never_gets_through(name: str) -> None:
    key = "k" if name == "trimmed_mean" else "f"
    for bad in (float("nan"), float("inf")):
        gradients = gradients_of(11, seed=4)
        gradients[2][1] = bad
        gradients[7][:] = bad
        assert aggregated(f"{name}({key}=2)", gradients).isfinite().all()


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_pushers_does_not_matter(name: str) -> None:
    gradients = [(g * 64).round() for g in gradients_of(7, seed=5)]  # whole numbers: every sum is exact
    found = {
        tuple(aggregated(name, [gradients[place] for place in order]).tolist())
        for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 97)
    }
    assert len(found) == 1


@pytest.mark.parametrize("name", ROBUST)
def test_one_vote_each_whatever_the_weights(name: str) -> None:
    gradients = gradients_of(7, seed=6)
    assert torch.equal(aggregated(name, gradients), aggregated(name, gradients, [100.0] + [1.0] * 6))


def test_one_attacker_turns_the_mean_into_whatever_it_wants() -> None:
    """It sends n times what it wants, less the others: linear rules bear nobody."""
    honest, wanted = gradients_of(6, seed=7), torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0], dtype=torch.float64)
    attack = 7 * wanted - torch.stack(honest).sum(0)
    torch.testing.assert_close(aggregated("weighted_mean", [*honest, attack]), wanted)
    for name in ROBUST:
        assert (aggregated(name, [*honest, attack]) - wanted).abs().min() > 0.1


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ("krum(f=2)", 7),
        ("multi_krum(f=2)", 7),
        ("multi_krum(f=1, m=4)", 7),
        ("bulyan(f=2)", 11),
        ("coordinate_median(f=2)", 5),
        ("trimmed_mean(k=2)", 5),
    ],
)
def test_too_few_gradients_are_refused(spec: str, least: int) -> None:
    made = aggregator(spec)
    assert made.least == least
    made.check(least)
    with pytest.raises(RequestError):
        made.check(least - 1)


@pytest.mark.parametrize(
    ("spec", "workers", "complaint"),
    [
        (
            "krum(f=2)",
            6,
            "krum(f=2) needs at least 7 gradients an update, and there are 6: ask for 7 synchronous workers, or "
            "for a smaller f",
        ),
        (
            "trimmed_mean(k=2)",
            4,
            "trimmed_mean(k=2) needs at least 5 gradients an update, and there are 4: ask for 5 synchronous "
            "workers, or for a smaller k",
        ),
        (
            "multi_krum(f=1, m=7)",
            7,
            "multi_krum(m=7): m is 7, but of 7 gradients at most 4 may be chosen (n - f - 2): ask for a smaller m, or "
            "leave it out",
        ),
    ],
)
def test_requests_that_cannot_be_are_one_line(spec: str, workers: int, complaint: str) -> None:
    with pytest.raises(RequestError) as error:
        strategy(f"parameter_server(consistency=synchronous, aggregator={spec})").check(workers)
    assert str(error.value) == complaint


def test_an_aggregator_of_single_gradients_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        strategy("parameter_server(aggregator=krum)").check(9)
    assert str(error.value) == (
        "krum chooses among several gradients, and asynchronous makes an update of every single one: use "
        "consistency=synchronous"
    )


def test_whole_gradients_of_other_workers_on_every_server_are_refused() -> None:
    spec = "parameter_server(servers={}, consistency={}, aggregator=krum)"
    strategy(spec.format(1, "softsync")).check(9)
    strategy(spec.format(2, "synchronous")).check(9)
    with pytest.raises(RequestError) as error:
        strategy(spec.format(2, "softsync")).check(9)
    assert str(error.value) == (
        "krum compares whole gradients, and with softsync several servers need not hold those of the same workers: use "
        "servers=1, or consistency=synchronous"
    )
    strategy(spec.format(2, "softsync").replace("krum", "coordinate_median")).check(9)
