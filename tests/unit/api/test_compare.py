"""`compare`: which runs it makes, that they are those of `simulate`, and that it goes on where it was."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.api import tune as tuning
from polyrhythm.api.compare import carry_out, compare, compare_runs, plan, read_plan
from polyrhythm.api.ddp import with_rate
from polyrhythm.api.simulate import simulate
from polyrhythm.claim import UNCLAIMED
from polyrhythm.errors import RequestError
from polyrhythm.reporting.comparison import read_run
from polyrhythm.specs import split_outside

pytestmark = pytest.mark.usefixtures("lent_processes")

JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "epochs": 2}
OFFICE = {"cluster": "office"}


def planned(**changed: Any) -> Any:
    given = {"strategies": "synchronous; local_sgd(steps=4)", "simulation": OFFICE, "options": JOB, **changed}
    return plan(**given)


def test_a_plan_has_every_combination_once() -> None:
    made = planned(workers=[1, 2], seeds=2, grid={"batch_size": [32, 64], "lr": [0.1]}).runs()
    assert len(made) == len({run.name for run in made}) == 2 * 2 * 2 * 2
    assert {(run.options["strategy"], run.options["workers"], run.options["seed"]) for run in made} == {
        (strategy, workers, seed)
        for strategy in ("synchronous", "local_sgd(steps=4)")
        for workers in (1, 2)
        for seed in (0, 1)
    }
    assert {run.options["optimizer"] for run in made} == {str(made[0].options["optimizer"])}
    assert "lr=0.1" in made[0].options["optimizer"]


def test_a_rate_of_the_grid_leaves_the_rest_of_the_optimizer() -> None:
    (run,) = planned(
        strategies="synchronous", grid={"lr": [0.3]}, options={**JOB, "optimizer": "adam(lr=1, beta1=0.8)"}
    ).runs()
    assert run.options["optimizer"] == "adam(lr=0.3, beta1=0.8)"


PLAN = """strategies: [synchronous]
workers: [1]
seeds: [0]
grid: {}
options: {data: digits, model: mlp, epochs: 1}
simulation: {cluster: office}
until: null
"""


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert read_plan(tmp_path) == planned(strategies="synchronous", workers=[1], options={**JOB, "epochs": 1})


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("until: null", "until: null\nworkers: [2]", r"workers is given twice \(line 8\)"),
        ("epochs: 1", "epochs: 1, epochs: 2", "epochs is given twice"),
        ("workers: [1]", "workers: [1:30]", r"workers\.0 should be a (valid integer|whole number)"),
        ("workers: [1]", "workers: 1", "plan.yaml is no plan of a comparison: workers"),
        ("workers: [1]", "workers: [0]", "workers must be numbers from 1"),
        ("seeds: [0]", "seeds: []", "seeds should be numbers that follow each other"),
        ("seeds: [0]", "seeds: [0, 2]", "seeds should be numbers that follow each other"),
        ("seeds: [0]", "sedes: [0]", "no plan of a comparison"),
        ("strategies: [synchronous]", "strategies: synchronous", "no plan of a comparison: strategies"),
        ("strategies: [synchronous]", "strategies: [synchronos]", "did you mean synchronous"),
        ("grid: {}", "grid: {lr: [0.1], lr: [0.2]}", "lr is given twice"),
        ("grid: {}", "grid: [", "plan.yaml is not YAML"),
        ("until: null", "until: null\ncases: [{workers: 2}]", "a case lacks its strategy or its workers"),
        (
            "until: null",
            "until: null\ncases: [{strategy: synchronos, workers: 2}]",
            "did you mean synchronous",
        ),
        (PLAN, "[]", "no plan of a comparison"),
        (PLAN, "!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_damaged_plan_is_refused_in_a_line(line: str, other: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.replace(line, other))
    with pytest.raises(RequestError, match=message) as refusal:
        read_plan(tmp_path)
    assert "\n" not in str(refusal.value)


def test_where_no_comparison_is_none_goes_on(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"cannot read the plan of a comparison .*plan\.yaml: No such file"
    ):
        read_plan(tmp_path)


def test_separators_inside_brackets_do_not_split() -> None:
    assert split_outside("a(x=[1; 2]; y=(3;)); b;; c", ";") == ["a(x=[1; 2]; y=(3;))", "b", "c"]
    assert split_outside("a(x=1, y=[2, 3]), b; c", ";,") == ["a(x=1, y=[2, 3])", "b", "c"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strategies": ""}, "name what to compare"),
        ({"strategies": "synchronous; synchronous"}, "given twice"),
        ({"strategies": "synchronos"}, "did you mean synchronous"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"workers": [0]}, "workers must be numbers from 1"),
        ({"grid": {"bach_size": [3]}}, "batch_size"),
        ({"grid": {"workers": [3]}}, "option of --grid"),
        ({"grid": {"batch_size": [0]}}, "batch_size"),
        ({"grid": {"lr": [0.1, "x"]}}, "lr must be numbers above 0"),
        ({"grid": {"learning_rate": [0.1]}}, "learning rate is called lr"),
        ({"until": "top1=2"}, "cannot read the target"),
        ({"until": "top1=0.5", "simulation": {"cluster": "office", "gradients": "none"}}, "needs training"),
        ({"simulation": {"gradients": "none"}}, "needs a simulated --cluster"),
        ({"simulation": {"cluster": "offce"}}, "office"),
        ({"options": {"port": 1}}, "--port"),
    ],
)
def test_wrong_plans(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planned(**changed)


def test_its_runs_are_those_of_simulate_and_are_made_once(tmp_path: Path) -> None:
    what, said = planned(seeds=2, workers=[2]), []
    done = carry_out(what, out=tmp_path / "c", jobs=2, notify=said.append)
    assert len(said) == 4
    assert done.folder == tmp_path / "c"
    assert [(row.strategy, [run.seed for run in row.runs]) for row in done.comparison.rows] == [
        ("synchronous", [0, 1]),
        ("local_sgd(steps=4)", [0, 1]),
    ]
    alone = simulate(cluster="office", strategy="local_sgd(steps=4)", seed=1, out=tmp_path / "alone", **JOB)
    assert done.comparison.rows[1].runs[1].known["parameters_sha256"] == alone.figures["parameters_sha256"]
    written = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert written == done.comparison.to_json()
    assert {"report.html", "table.md", "table.csv", "table.tex", "plan.yaml"} <= {
        path.name for path in (tmp_path / "c").iterdir()
    }

    logs = {path: path.read_bytes() for path in (tmp_path / "c").glob("*/events.jsonl")}
    first = sorted(logs)[0]
    first.write_bytes(logs[first].rsplit(b"\n", 2)[0] + b"\n")  # as if it had been killed before its end
    said.clear()
    again = carry_out(read_plan(tmp_path / "c"), resume=tmp_path / "c", notify=said.append)
    assert said[0] == "3 of 4 runs are complete"
    assert len(said) == 2
    assert again.comparison.to_json() == done.comparison.to_json()
    assert {path: path.read_bytes() for path in logs} == logs

    read = compare(tmp_path / "c", until="top1=0.1")
    assert [len(row.runs) for row in read.comparison.rows] == [2, 2]


def test_a_comparison_that_was_killed_goes_on_where_it_is_asked_for_again(tmp_path: Path) -> None:
    """Before its first run, in the middle of one, and while a report of runs that exist is written."""
    what, said, folder = planned(seeds=1, workers=[2]), [], tmp_path / "c"
    done = carry_out(what, out=folder, jobs=1)
    for path in folder.iterdir():
        if path.name != "plan.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / ".start-00000001-0123456789abcdef").mkdir()
    again = carry_out(what, out=folder, jobs=1, notify=said.append)
    assert len(said) == 2
    assert (
        again.comparison.rows[0].runs[0].known["parameters_sha256"]
        == (done.comparison.rows[0].runs[0].known["parameters_sha256"])
    )
    with pytest.raises(RequestError, match=r"holds another comparison: .* continue it with --resume"):
        carry_out(planned(seeds=2, workers=[2]), out=folder, jobs=1)

    report = tmp_path / "report"
    whole = compare(folder, out=report)
    for name in ("report.html", "comparison.json"):
        (report / name).unlink()
    (report / ".table.csv.partial").write_text("half")
    UNCLAIMED.draft(report / "report.html").write_text("half")
    assert compare(folder, out=report).comparison.to_json() == whole.comparison.to_json()
    (report / "mine.txt").touch()
    with pytest.raises(RequestError, match="is not empty, and holds no run"):
        compare(folder, out=report)


@pytest.mark.parametrize("strategy", ["parameter_server", "local_sgd(steps=4)", "ad_psgd"])
def test_a_number_of_workers_that_is_text_gets_its_default_optimizer(strategy: str) -> None:
    """As the command line gives it."""
    expected = with_rate({"strategy": strategy, "workers": 3}, 0.05)
    assert with_rate({"strategy": strategy, "workers": "3"}, 0.05) == expected
    assert "lr=0.05" in expected["optimizer"]
    with pytest.raises(RequestError, match=r"workers should be a whole number \(given 'x'\)"):
        with_rate({"strategy": strategy, "workers": "x"}, 0.05)


def test_a_combination_that_cannot_be_is_left_out_with_its_reason(tmp_path: Path) -> None:
    what = planned(strategies="synchronous; hogwild", workers=[2])
    done = carry_out(what, out=tmp_path / "c", jobs=1)
    assert [row.strategy for row in done.comparison.rows] == ["synchronous"]
    assert list(done.comparison.refused) == ["hogwild, 2 workers"]
    assert "memory that all workers share" in (tmp_path / "c" / "report.html").read_text()


def test_nothing_is_left_of_a_comparison_of_which_no_run_is_possible(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="memory that all workers share"):
        carry_out(planned(strategies="hogwild", workers=[2]), out=tmp_path / "c", jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_dry_runs_have_throughput_alone(tmp_path: Path) -> None:
    simulation = {**OFFICE, "gradients": "none", "steps": 4}
    done = carry_out(
        planned(workers=[1, 2], simulation=simulation, options={"model": "mlp"}), out=tmp_path / "c", jobs=1
    )
    heads, rows = done.comparison.table()
    assert "top-1" not in heads
    assert len(rows) == 4
    assert all(row[heads.index("images/s")] != "–" for row in rows)


def test_every_strategy_gets_its_own_rate_with_equal_effort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a function in place of the trials: the best rate of `synchronous` is 0.3, of `local_sgd` 0.02."""
    best, tried = {"synchronous": 0.3, "local_sgd(steps=4)": 0.02}, []

    class Trials:
        def make(self, task: dict[str, Any], judge: Any = None) -> dict[str, Any]:
            options = task["options"]
            rate = float(re.search(r"lr=([0-9.e-]+)", options["optimizer"])[1])  # type: ignore[index]
            tried.append((options["strategy"], rate))
            top1 = 1 / (1 + abs(math.log(rate / best[options["strategy"]])))
            return {"outcome": "done", "test_top1": top1, "seconds": 1.0, "images_per_s": 1.0, "epochs": 2}

        def close(self) -> None:
            pass

    monkeypatch.setattr(tuning, "RunProcess", Trials)
    made = planned(tune="lr=0.001..1", trials=12)
    done = carry_out(made, out=tmp_path / "c", jobs=1)
    counts = Counter(strategy for strategy, _ in tried)
    assert counts == {"synchronous": 12, "local_sgd(steps=4)": 12}
    for row in done.comparison.rows:
        rates = [rate for strategy, rate in tried if strategy == row.strategy]
        expected = min(rates, key=lambda rate: abs(math.log(rate / best[row.strategy])))
        (run,) = row.runs
        assert float(re.search(r"lr=([0-9.e-]+)", run.config["optimizer"])[1]) == pytest.approx(
            expected, rel=1e-3
        )  # type: ignore[index]
    note = done.comparison.verdict()[-1]
    assert note.startswith("Every row has its own learning rate, the best of 12 trials")
    assert "synchronous, 2 workers: " in note
    assert note in unescape((tmp_path / "c/report.html").read_text())
    assert "--tune lr=0.001..1 --trials 12" in made.command()
    assert read_plan(tmp_path / "c") == made
    tried.clear()
    carry_out(read_plan(tmp_path / "c"), resume=tmp_path / "c", jobs=1)
    assert not tried


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tune": "momentum"}, "cannot read --tune 'momentum'"),
        ({"tune": "lr", "grid": {"lr": [0.1]}}, "leave one of them out"),
        ({"tune": "lr", "trials": 1}, "--trials must be at least 2"),
        ({"tune": "lr", "simulation": {**OFFICE, "gradients": "none"}}, "--tune needs training"),
    ],
)
def test_rates_that_cannot_be_tuned_are_refused(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        planned(**changed)


def test_a_run_that_is_named_twice_is_not_two_seeds(tmp_path: Path) -> None:
    simulate(cluster="office", data="digits", model="mlp", epochs=1, workers=1, out=tmp_path / "a")
    with pytest.raises(RequestError, match="a is given twice, and would count as two runs"):
        compare_runs([tmp_path / "a", tmp_path / "a"])


def test_a_simulated_run_that_was_cut_short_is_known_to_be_simulated(tmp_path: Path) -> None:
    run = simulate(cluster="office", data="digits", model="mlp", epochs=1, workers=1, out=tmp_path / "a")
    assert run is not None
    log = tmp_path / "a" / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    found = read_run(tmp_path / "a")
    assert (found.outcome, found.simulated) == ("unfinished", True)
