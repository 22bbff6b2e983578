"""`plan`: which candidates there are, which are tried, how they are ranked, and that wrong requests are refused."""

from __future__ import annotations

import html
import json
import math
import random
import shlex
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api import plan as planning
from polyrhythm.api import race
from polyrhythm.api.compare import carry_out, read_plan
from polyrhythm.api.plan import Choice, plan
from polyrhythm.api.rehearsal import Candidate, rehearse, with_servers
from polyrhythm.cli.plan import _print_result
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.planning.intervals import noise_of, t_quantile
from polyrhythm.reporting.quantities import duration
from polyrhythm.simulation.cluster import Cluster, cluster_text
from polyrhythm.specs import parse

pytestmark = pytest.mark.usefixtures("lent_processes")

JOB: dict[str, Any] = {"cluster": "ut_austin", "data": "digits", "model": "mlp"}


def candidate(family: str, workers: int = 2, speed: float = 1.0, **changed: Any) -> Candidate:
    return Candidate(
        strategy=changed.pop("strategy", family),
        family=family,
        workers=workers,
        options=changed.pop("options", {}),
        images_per_s=speed,
        **changed,
    )


def choice(
    name: str, seconds: float, price: float | None, *, price_per_hour: float | None = None, reached: int = 1
) -> Choice:
    return Choice(
        candidate=candidate(name, price_per_hour=price_per_hour),
        images=(1.0, 1.0, 1.0),
        seconds=(seconds,) * 3,
        price=price,
        reached=reached,
        trials=reached,
        command="",
    )


def test_servers_and_their_place_are_answers_unless_they_are_given() -> None:
    found = with_servers("parameter_server", 4)
    assert len(found) == 6
    assert "parameter_server(servers=2, placement=dedicated)" in found
    assert with_servers("parameter_server(servers=3, placement=shared)", 4) == [
        "parameter_server(servers=3, placement=shared)"
    ]
    assert with_servers("synchronous", 4) == ["synchronous"]


def test_every_strategy_is_tried_and_of_its_servers_only_the_fastest() -> None:
    found = [
        candidate("a", speed=9, strategy="a(servers=2)"),
        candidate("a", speed=8, strategy="a(servers=1)"),
        candidate("a", workers=1, speed=7),
        candidate("b", speed=6),
        candidate("c", speed=5),
    ]
    first, rest = planning.most_promising(found)
    assert [each.images_per_s for each in first] == [9, 6, 5]
    assert [each.images_per_s for each in rest] == [7]


def test_candidates_within_the_noise_of_seeds_share_a_rank_and_the_cheaper_one_is_first() -> None:
    """Seeds differ by 10 %: 100 and 105 s of three seeds each are alike, 200 s is not."""
    noise = planning.Noise(0.1, 6)
    quick = choice("synchronous", 100, 2.0, price_per_hour=72.0, reached=3)
    cheap = choice("easgd", 105, 1.0, price_per_hour=34.0, reached=3)
    slow = choice("local_sgd", 200, 0.5, price_per_hour=9.0, reached=3)
    found = planning.ranked([slow, quick, cheap], noise, for_money=False)
    assert [(each.candidate.family, each.rank) for each in found] == [
        ("easgd", 1),
        ("synchronous", 1),
        ("local_sgd", 2),
    ]
    found = planning.ranked([slow, quick, cheap], noise, for_money=True)
    assert [each.candidate.family for each in found] == ["local_sgd", "easgd", "synchronous"]
    alone = planning.ranked([quick, cheap], planning.Noise(math.nan, 0), for_money=False)
    assert [each.rank for each in alone] == [1, 2]  # nothing is known of noise


def test_where_nothing_else_decides_the_simpler_one_is_first() -> None:
    noise = planning.Noise(0.1, 6)
    averaged, lockstep = (
        choice(name, seconds, None, reached=2) for name, seconds in (("easgd", 99), ("synchronous", 101))
    )
    best, _ = planning.ranked([averaged, lockstep], noise, for_money=False)
    assert best.candidate.family == "synchronous"


def test_where_time_alone_counts_the_simpler_one_is_first_among_equally_fast_ones() -> None:
    noise = planning.Noise(0.1, 6)
    fast, simple, slower = (
        choice(name, seconds, None, reached=2)
        for name, seconds in (("easgd", 100), ("synchronous", 101), ("local_sgd", 105))
    )
    found = planning.ranked([slower, fast, simple], noise, for_money=False, equal=1.02)
    assert [(each.candidate.family, each.rank) for each in found] == [
        ("synchronous", 1),
        ("easgd", 1),
        ("local_sgd", 1),
    ]
    first, *_ = planning.ranked(
        [fast, replace(simple, seconds=(103,) * 3)], noise, for_money=False, equal=1.02
    )
    assert first.candidate.family == "easgd"


def test_intervals_hold_four_of_five_unseen_seeds() -> None:
    """400 intervals of candidates with three seeds each, whose times differ by 15 %, against a fourth seed."""
    generator, hits, tries = random.Random(3), 0, 400
    for _ in range(tries // 8):
        drawn = [[100 * math.exp(generator.gauss(0, 0.15)) for _ in range(4)] for _ in range(8)]
        noise = noise_of([each[:3] for each in drawn])
        for each in drawn:
            _, low, high = noise.interval(statistics.fmean(each[:3]), 3)
            hits += low < each[3] < high
    assert 0.76 * tries < hits < 0.84 * tries


def test_seeds_that_reach_the_target_at_the_same_test_do_not_make_the_time_exact() -> None:
    """Tests after 1, 2, 3, … seconds: all seeds had reached it at 4 s, and not at 3 s."""
    same = [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    gaps = [math.log(4 / 3)] * 6
    assert noise_of(same).interval(4.0, 3) == (4.0, 4.0, 4.0)
    _, low, high = noise_of(same, gaps).interval(4.0, 3)
    assert math.log(high / 4) == pytest.approx(t_quantile(2) * math.log(4 / 3) / 12**0.5 * (4 / 3) ** 0.5)
    assert low == pytest.approx(16 / high)
    apart = [[3.0, 5.0], [3.0, 5.0]]  # seeds that differ by more already have that in them
    assert noise_of(apart, gaps) == noise_of(apart)


def test_the_pareto_choices_are_those_that_none_beats_in_both() -> None:
    choices = [choice("a", 1, 9), choice("b", 2, 5), choice("c", 3, 6), choice("d", 4, 5), choice("e", 5, 1)]
    assert [each.candidate.family for each in planning.pareto_choices(choices)] == ["a", "b", "e"]
    assert planning.pareto_choices([choice("a", 1, None)]) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "top1=2"}, "cannot read the target"),
        ({"cluster": "office", "budget": 3.0}, "cluster office has no prices"),
        ({"budget": 3.0, "currency": "EUR"}, "has prices in USD, not EUR"),
        ({"budget": -1.0}, "budget must be above 0"),
        ({"optimize": "beauty"}, "optimize is time or money"),
        ({"strategy": "synchronous"}, "leave --strategy out"),
        ({"svrg": "own"}, "do not count the passes of svrg"),
        ({"trials": 0}, "must be at least 1"),
        ({"batch_sizes": [32, 64]}, "does not specify how step times grow with the batch"),
        ({"workers": [99], "strategies": "synchronous"}, "99 workers do not fit"),
        ({"strategies": "synchronos"}, "did you mean synchronous"),
        ({"strategies": 'synchronous; stages("easgd until 0.5; synchronous")'}, "compare has rows of stages"),
        ({"strategies": ["ensemble(members=2)"]}, "compare has rows of stages and ensembles"),
    ],
)
def test_requests_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        plan(**{**JOB, "target": "top1=0.5", "out": tmp_path / "plan", **changed})
    assert not (tmp_path / "plan").exists()


def test_a_plan_ranks_what_its_trials_have_shown(tmp_path: Path) -> None:
    """One trial reaches the target; its time is that of its test, and its price that of its host for that time."""
    asked = {**JOB, "strategies": "synchronous", "workers": [1], "seeds": 1, "jobs": 1}
    found = plan(**asked, target="top1=0.5", epochs=3, out=tmp_path / "plan")
    (best,) = found.choices
    (folder,) = (path for path in (tmp_path / "plan").iterdir() if path.is_dir())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event.get("test_top1", 0) >= 0.5)
    assert best.seconds[0] == first["time_s"]
    assert best.price == pytest.approx(0.19 * first["time_s"] / 3600)
    assert best.reached == best.trials == 1
    assert found.pareto == [best]
    assert "--strategy synchronous --workers 1 --until top1=0.5 --epochs 3" in best.command
    command = (
        "polyrhythm plan --cluster ut_austin --target top1=0.5 --strategies synchronous --workers 1 --seeds 1"
    )
    assert command in (tmp_path / "plan" / "report.html").read_text()
    assert "images/s on 1 host" in found.explained(best)
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["choices"][0]["workers"] == 1

    # A comparison does not take the place of its report.
    page = (tmp_path / "plan" / "report.html").read_bytes()
    with pytest.raises(
        RequestError, match=r"holds a plan, .* repeat it with polyrhythm plan --cluster ut_austin"
    ):
        carry_out(read_plan(tmp_path / "plan"), resume=tmp_path / "plan", jobs=1)
    assert (tmp_path / "plan" / "report.html").read_bytes() == page


def test_a_trial_continues_beyond_the_epochs_of_the_job(tmp_path: Path) -> None:
    """One epoch of four workers is not enough; the command has the epochs that were."""
    asked = {**JOB, "strategies": "synchronous", "workers": [4], "seeds": 1, "jobs": 1, "compressors": "none"}
    found = plan(**asked, target="top1=0.7", epochs=1, out=tmp_path / "plan")
    assert found.recommended.epochs == 8
    assert found.recommended.command.endswith("--epochs 8")
    assert "--until top1=0.7" in found.recommended.command


def test_what_is_not_known_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        **JOB,
        "strategies": "synchronous",
        "workers": [1, 8],
        "seeds": 1,
        "jobs": 1,
        "compressors": "none",
    }
    found = plan(**asked, target="top1=0.6", epochs=1, trial_epochs=1, out=tmp_path / "plan")
    assert [each.candidate.workers for each in found.choices] == [1]
    (other,) = found.others
    assert other.left_out.startswith("not known within 1 epoch: the best was top1 ")
    page = (tmp_path / "plan" / "report.html").read_text()
    assert "Recommended" in page
    assert found.recommended.command in page
    assert f"synchronous, 8 workers: {other.left_out}" in page
    assert page.index("Recommended") < page.index("Ranking") < page.index("Left out") < page.index("Trials")
    _print_result(found)
    printed = capsys.readouterr().out
    assert printed.startswith("recommended synchronous, 1 worker: ")
    command = printed.replace(" \\\n", " ").partition("run it")[2].partition("\n")[0]
    assert shlex.split(command) == shlex.split(found.recommended.command)
    assert "virtual time" in printed
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100


def test_a_plan_without_a_recommendation_says_why_in_its_report(tmp_path: Path) -> None:
    asked = {**JOB, "strategies": "synchronous", "workers": [1], "seeds": 1, "jobs": 1, "compressors": "none"}
    with pytest.raises(RequestError, match="nothing reaches top-1 60") as wrong:
        plan(**asked, target="top1=0.6", epochs=1, trial_epochs=1, deadline_s=1e-3, out=tmp_path / "plan")
    page = (tmp_path / "plan" / "report.html").read_text()
    assert f"No recommendation: {wrong.value}." in html.unescape(page)


@pytest.mark.parametrize(("target", "reached"), [("top1=0.88", True), ("top1=0.95", False)])
def test_a_dominated_candidate_is_no_choice_and_its_trial_ends(
    target: str, reached: bool, tmp_path: Path
) -> None:
    """Over 1 Mb/s a step with an exchange takes seconds; with a sixteenth of the exchanges the target is near."""
    (tmp_path / "slow.yaml").write_text(cluster_text(linked(1e6, 1.0, 1.0)))
    asked = {
        **SMALL,
        "strategies": "synchronous; local_sgd(steps=16)",
        "workers": [2],
        "seeds": 1,
        "jobs": 1,
        "compressors": "none",
    }
    found = plan(**asked, cluster=tmp_path / "slow.yaml", target=target, epochs=20, out=tmp_path / "plan")
    assert [each.candidate.family for each in found.choices] == ["local_sgd(steps=16)"]
    (other,) = found.others
    assert other.left_out.startswith("there after" if reached else "not there after")
    assert other.left_out.endswith(f"and another was after {duration(found.recommended.seconds[0])}")
    (log,) = (tmp_path / "plan").glob("synchronous*/events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    tests = [event["time_s"] for event in events if event["event"] == "Evaluated"]
    assert tests[-1] > 3 * found.recommended.seconds[0]  # beyond what seeds change
    assert len(tests) < 20


def test_fewer_workers_are_tried_where_they_may_be_as_good(tmp_path: Path) -> None:
    """On small data 16 workers are little sooner than 2; a comparison of all finds the same order."""
    asked = {
        "cluster": "spot",
        "data": "digits",
        "model": "mlp",
        "strategies": "ad_psgd",
        "compressors": "none",
    }
    found = plan(
        **asked, workers=[16, 4, 2], target="top1=0.85", epochs=40, seeds=2, jobs=1, out=tmp_path / "plan"
    )
    assert {each.candidate.workers for each in found.choices} == {16, 4, 2}
    best, *others = sorted(found.choices, key=lambda each: each.seconds[0])
    assert best.rank == found.recommended.rank == 1
    alike = [each for each in others if each.rank == 1]
    assert all(
        found.recommended.candidate.price_per_hour <= each.candidate.price_per_hour for each in (best, *alike)
    )


def test_an_interrupted_race_keeps_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = race.make_runs, []

    def interrupted(*arguments: Any) -> bool:
        calls.append(make(*arguments))
        return True  # as after Ctrl-C

    monkeypatch.setattr(race, "make_runs", interrupted)
    asked = {**JOB, "strategies": "synchronous", "workers": [1], "seeds": 3, "jobs": 1}
    found = plan(**asked, target="top1=0.5", epochs=3, out=tmp_path / "plan")
    assert found.interrupted
    assert (found.recommended.reached, len(calls)) == (1, 1)
    assert "interrupted" in " ".join(found.table().notes)
    with pytest.raises(KeyboardInterrupt):
        plan(**asked, target="top1=0.999", epochs=1, out=tmp_path / "nothing")


def test_a_trial_that_was_interrupted_is_not_said_to_have_had_its_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the longer trials of two candidates, once the first one has reached the target."""
    judge, reached = race.Race._judge, []

    def judged(self: race.Race, *arguments: Any) -> bool:
        goes_on = judge(self, *arguments)
        reached.extend([True] if self._reached else [])
        return goes_on and not reached

    make = race.make_runs

    def interrupted(*arguments: Any) -> bool:
        return make(*arguments) or bool(reached)

    monkeypatch.setattr(race.Race, "_judge", judged)
    monkeypatch.setattr(race, "make_runs", interrupted)
    asked = {**JOB, "strategies": "synchronous; easgd", "workers": [4], "seeds": 1, "jobs": 1}
    found = plan(
        **asked, target="top1=0.85", epochs=2, trial_epochs=40, compressors="none", out=tmp_path / "plan"
    )
    assert found.interrupted
    (other,) = found.others
    assert other.left_out.startswith("not known within 2 epochs: the best was top1 ")


MACHINES = """
currency: EUR
date: 2025-01
source: a test
machines:
  quick: {per_hour: 10, cores: 8}
  cheap: {per_hour: 0.1, cores: 1}
  unknown: {per_hour: 1}
  card: {per_hour: 1, cores: 8, accelerators: 1}
"""


def priced(tmp_path: Path) -> Path:
    (tmp_path / "prices.yaml").write_text(MACHINES)
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"name: own\nhosts: [{{name: box, count: 2, cores: 2, price_per_hour: 1}}]\nprices: {tmp_path}/prices.yaml\n"
        "currency: EUR\nnic: {latency_s: 1.0e-5, bandwidth_bytes_per_s: 1.0e+9}\n"
        "inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e+10}\nstep_time: constant(seconds=0.1)\n"
    )
    return path


def test_intervals_hold_where_a_seed_is_lucky_for_all_candidates() -> None:
    """12 candidates, 3 seeds that all share, as racing has them: four of five further seeds lie within."""
    generator, hits, count = random.Random(0), 0, 0
    for _ in range(400):
        luck = [generator.gauss(0, 0.1) for _ in range(4)]
        drawn = [[math.exp(each + generator.gauss(0, 0.02)) for each in luck] for _ in range(12)]
        noise = noise_of([each[:3] for each in drawn])
        for *seen, further in drawn:
            _, low, high = noise.interval(statistics.fmean(seen), 3)
            hits, count = hits + (low <= further <= high), count + 1
    assert 0.75 < hits / count < 0.85


def test_machines_of_a_price_list_are_candidates(tmp_path: Path) -> None:
    """Four times the cores at ten times the price are soonest, half of them at a tenth of it are cheapest."""
    asked = {
        **JOB,
        "cluster": priced(tmp_path),
        "strategies": "synchronous",
        "workers": [1],
        "seeds": 1,
        "jobs": 1,
    }
    asked |= {"target": "top1=0.5", "epochs": 3, "machines": "quick; cheap"}
    found = plan(**asked, out=tmp_path / "time")
    assert [each.candidate.machine for each in found.choices] == ["quick", "", "cheap"]
    quick, own, cheap = found.choices
    assert (quick.seconds[0], cheap.seconds[0]) == pytest.approx(
        (own.seconds[0] / 4, own.seconds[0] * 2), rel=0.1
    )
    assert cheap.price == pytest.approx(0.1 / 3600 * cheap.seconds[0])
    assert {each.candidate.machine for each in found.pareto} == {"quick", "", "cheap"}
    assert "on 1 host (quick)" in found.explained(quick)
    cheapest = plan(**asked, optimize="money", budget=1, currency="EUR", out=tmp_path / "money")
    assert [each.candidate.machine for each in cheapest.choices] == ["cheap", "", "quick"]


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        ("quik", "did you mean quick"),
        ("unknown", "does not describe unknown: give it cores"),
        ("card", "does not describe card: give it speed"),
    ],
)
def test_machines_that_are_not_known_are_refused(machines: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        plan(**{**JOB, "cluster": priced(tmp_path), "target": "top1=0.5", "machines": machines})
    with pytest.raises(RequestError, match="office has no price list"):
        plan(**{**JOB, "cluster": "office", "target": "top1=0.5", "machines": machines})


def test_machines_without_a_description_are_named_among_those_left_out(tmp_path: Path) -> None:
    job = {"data": "digits", "model": "mlp", "strategies": "synchronous", "workers": [1]}
    found = plan(cluster=priced(tmp_path), target="images=1e4", machines="all", out=tmp_path / "plan", **job)
    assert found.refused["unknown"] == "its price list does not have its cores"
    assert found.refused["card"] == "its price list does not have its speed"
    assert {each.candidate.machine for each in found.choices} == {"", "quick", "cheap"}


def test_too_small_a_budget_says_what_the_cheapest_takes() -> None:
    text = planning.too_little(
        Target("top1", 0.5), "1 USD", [choice("a", 90, 5.0), choice("b", 100, 2.0)], "USD"
    )
    assert text == (
        "nothing reaches top-1 50.0 % within 1 USD: the fastest, a, 2 workers, takes 0:01:30; the cheapest, b, "
        "2 workers, 2 USD"
    )


def test_of_every_strategy_that_can_be_compressed_the_fastest_is_tried_so() -> None:
    found = [
        candidate("parameter_server", 2, 9.0, strategy="parameter_server(servers=2)", hosts=2),
        candidate("parameter_server", 4, 8.0, strategy="parameter_server(servers=1)"),
        candidate("synchronous", 4, 7.0),
        candidate("easgd", 4, 6.0),
    ]
    refused: dict[str, str] = {}
    made = planning.compressed_candidates(found, ["int8", "sign_sgd"], refused)
    assert [(each.strategy, each.workers) for each in made] == [
        ("parameter_server(servers=2, compress=int8)", 2),
        ("synchronous(compress=int8)", 4),
        ("synchronous(compress=sign_sgd)", 4),
    ]
    assert made[0].hosts == 2
    assert list(refused) == ["parameter_server(servers=2, compress=sign_sgd), 2 workers"]
    with pytest.raises(RequestError, match="can be compressed"):
        planning.compressed_candidates(found[3:], ["int8"], {})


def test_a_compressed_candidate_has_the_rate_of_its_trial(tmp_path: Path) -> None:
    asked = {**JOB, "strategies": "synchronous", "workers": [2], "seeds": 1, "jobs": 1, "compressors": "int8"}
    found = plan(**asked, target="top1=0.3", epochs=2, out=tmp_path / "plan")
    every = {each.candidate.strategy: each for each in (*found.choices, *found.others)}
    assert set(every) == {"synchronous", "synchronous(compress=int8)"}
    assert every["synchronous(compress=int8)"].candidate.images_per_s > 0
    json.dumps(found.to_json(), allow_nan=False)


def linked(bits_per_s: float, *speeds: float) -> Cluster:
    """Return hosts of one worker each, on links of so many bits a second."""
    hosts = [
        {"name": f"h{number}", "count": 1, "cores": 1, "speed": speed} for number, speed in enumerate(speeds)
    ]
    nic = {"latency_s": 1e-5, "bandwidth_bytes_per_s": bits_per_s / 8}
    inside = {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e10}
    described = {
        "name": "own",
        "hosts": hosts,
        "nic": nic,
        "inside": inside,
        "step_time": "constant(seconds=0.02)",
    }
    return Cluster.model_validate(described)


SMALL: dict[str, Any] = {"data": "digits", "model": "mlp(hidden=256)", "batch_size": 32}


def test_compression_is_tried_where_less_to_send_is_sooner_there() -> None:
    """Over 1 Mb/s the gradient takes seconds, and little is left of that; over 10 Gb/s nothing is to be won."""
    for bits_per_s, expected in ((1e6, True), (1e10, False)):
        where = linked(bits_per_s, 1.0, 1.0)
        plain = rehearse(where, [candidate("synchronous"), candidate("easgd(servers=1)")], SMALL, {})
        made = planning.worth_compressing(where, plain, SMALL)
        assert [parse(each.strategy).name for each in made] == ["synchronous"] * expected
        for each in made:
            alone = next(other for other in plain if other.family == "synchronous")
            assert each.images_per_s > 3 * alone.images_per_s
            assert each.compress_s > 0
            assert "compress=" in each.strategy


def test_what_compressing_takes_comes_off_what_a_simulation_says() -> None:
    """10 ms for each image, at 100 images a second of virtual time: half of them are left."""
    assert candidate("a", compress_s=0.01).with_compressing(100.0) == pytest.approx(50.0)
    assert candidate("a").with_compressing(100.0) == 100.0


def test_on_uneven_hosts_those_who_wait_for_each_other_have_parts_by_speed() -> None:
    uneven, even = linked(1e9, 1.0, 0.25), linked(1e9, 1.0, 1.0)
    assert planning.is_uneven(uneven)
    assert not planning.is_uneven(even)
    asked = [
        candidate("synchronous"),
        candidate("parameter_server(servers=1)"),
        candidate("synchronous", workers=1),
    ]
    made = list(planning.balanced(asked, SMALL))
    assert [each.strategy for each in made] == [each.strategy for each in asked]
    assert [each.options for each in made] == [{"balance": "measured"}, {}, {}]
    equal = candidate("synchronous", options={"balance": "off"})
    by_speed, slower = rehearse(uneven, [equal, made[0]], SMALL, {})
    assert by_speed.options == {"balance": "measured"}
    assert by_speed.images_per_s > 1.3 * slower.images_per_s


def test_a_pipeline_stays_where_it_is_faster_than_copies_of_the_network() -> None:
    """It learns as they do, so that speed is all that tells them apart."""
    pipeline = candidate("pipeline", speed=5, cuts_network=True)
    refused: dict[str, str] = {}
    slower = candidate("synchronous", speed=4)
    assert planning.without_slow_pipelines([pipeline, slower], refused) == [pipeline, slower]
    faster = candidate("synchronous", speed=6)
    assert planning.without_slow_pipelines([faster, pipeline], refused) == [faster]
    assert refused == {"pipeline, 2 workers": "same updates as synchronous, 2 workers, which is faster"}


def test_a_pipeline_is_rehearsed_as_its_stages_are_cut() -> None:
    network = {**SMALL, "model": "mlp(hidden=[256, 256])"}
    (found,) = rehearse(linked(1e9, 1.0, 1.0), [candidate("pipeline(balance=auto)")], network, {})
    assert "cut=" in found.strategy
    assert found.cuts_network
    assert found.images_per_s > 0


def test_a_choice_of_balance_finds_its_own_trials(tmp_path: Path) -> None:
    (tmp_path / "uneven.yaml").write_text(cluster_text(linked(1e9, 1.0, 0.6)))
    asked = {**SMALL, "strategies": "synchronous", "workers": [2], "seeds": 1, "jobs": 1, "trials": 2}
    found = plan(
        **asked, cluster=tmp_path / "uneven.yaml", target="top1=0.3", epochs=3, out=tmp_path / "plan"
    )
    (choice,) = (*found.choices, *found.others)
    assert choice.candidate.options == {"balance": "measured"}
    assert choice.trials == 1
    assert "--balance measured" in choice.command


def test_a_number_of_images_is_planned_by_dry_runs_alone(tmp_path: Path) -> None:
    """Steps of 0.1 s and 8 images: 1,000 images take 12.5 s of one worker, and two are nearly twice as fast."""
    asked: dict[str, Any] = {"cluster": priced(tmp_path), "model": "sizes(parameters=1000)", "batch_size": 8}
    asked |= {"strategies": "synchronous; local_sgd(steps=4)", "workers": [1, 2], "target": "images=1000"}
    found = plan(**asked, out=tmp_path / "plan")
    assert [each.candidate.name for each in found.choices] == [
        "synchronous, 2 workers",
        "synchronous, 1 worker",
        "local_sgd(steps=4), 1 worker",  # the same
    ]
    assert [each.seconds[0] for each in found.choices] == pytest.approx([6.25, 12.5, 12.5], rel=0.02)
    assert found.choices[0].price == pytest.approx(2 * 6.25 / 3600, rel=0.02)
    assert found.recommended.command == "polyrhythm run --workers 2 SCRIPT"
    assert [each.candidate.name for each in found.others] == ["local_sgd(steps=4), 2 workers"]
    assert not list((tmp_path / "plan").glob("*/")), "nothing is trained"
    page = (tmp_path / "plan" / "report.html").read_text()
    assert "1,000 images on own" in page
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["target"]["metric"] == "images"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"target": "top1=0.9"}, "cannot be trained to top-1"),
        ({"target": "images=some"}, "write images=1e6"),
        ({"trials": 3}, "trains nothing"),
        ({"budget": 1e-9}, "within 1e-09 EUR"),
        ({"strategies": "local_sgd(steps=4)"}, "stale or averaged"),
    ],
)
def test_plans_for_images_that_make_no_sense_are_refused(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    asked: dict[str, Any] = {"cluster": priced(tmp_path), "model": "sizes(parameters=1000)", "workers": [2]}
    asked |= {"strategies": "synchronous", "target": "images=1000", **changed}
    with pytest.raises(RequestError, match=why):
        plan(**asked, out=tmp_path / "plan")
    assert not (tmp_path / "plan").exists()
