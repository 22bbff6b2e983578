"""`tune`: which trials it makes, that each is made once whatever dies, and what it refuses.

Most tests put a function in place of the processes that make runs; the last ones make runs.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyrhythm.api import tune as tuning
from polyrhythm.api.run_process import Judge
from polyrhythm.api.simulate import simulate
from polyrhythm.api.tune import Budget, budget_of, carry_out, plan, read_plan
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model

pytestmark = pytest.mark.usefixtures("lent_processes")

RATES: dict[str, Any] = {"lr": {"from": 0.001, "to": 1.0, "log": True}}
JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "epochs": 9}
OFFICE = {"cluster": "office"}
Objective = Callable[[Mapping[str, Any], int], float]


class Pretended:
    """Makes runs by a function of their options and epochs.

    Attributes:
        made: names of the folders, in the order in which runs ended.
        deaths: how often the process dies before it makes the run of a folder.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.made: list[str] = []
        self.tasks: list[Mapping[str, Any]] = []
        self.deaths: Counter[str] = Counter()
        self.interrupt_at: int | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Pretended:
        """Stand for a new process."""
        return self

    def make(self, task: Mapping[str, Any], judge: Judge | None = None) -> dict[str, Any]:
        name = Path(task["folder"]).name
        with self._lock:
            if self.interrupt_at is not None and len(self.made) >= self.interrupt_at:
                return {"outcome": "interrupted"}
            if self.deaths[name]:
                self.deaths[name] -= 1
                return {"outcome": "failed", "error": "its process ended with status -9", "died": True}
            self.tasks.append(task)
        options = task["options"]
        end = options["epochs"]
        outcome = "done"
        for epoch in range(1, end + 1):
            value = self.objective(options, epoch)
            if judge is not None and not judge(epoch, {"top1": value, "top5": 1.0, "loss": 1 - value}):
                outcome, end = "stopped", epoch
                break
        with self._lock:
            self.made.append(name)
        return {
            "outcome": outcome,
            "test_top1": value,
            "test_loss": 1 - value,
            "seconds": 60.0,
            "price": 0.5,
            "epochs": end,
        }

    def close(self) -> None:
        """Nothing runs."""


def rate(options: Mapping[str, Any]) -> float:
    return float(options["optimizer"].partition("lr=")[2].rstrip(")").split(",")[0])


def hill(options: Mapping[str, Any], epoch: int) -> float:
    """Best at a rate of 0.05, and better with every epoch."""
    return max(0.0, 0.95 - 0.2 * math.log10(rate(options) / 0.05) ** 2 - 0.3 * epoch**-0.8)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended(hill)
    monkeypatch.setattr(tuning, "RunProcess", made)
    return made


def planned(space: Any = None, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "method": "random",
        "budget": "6 trials",
        "simulation": OFFICE,
        "options": JOB,
        **changed,
    }
    return plan(RATES if space is None else space, **given)


@pytest.mark.parametrize("method", ["random", "tpe", "hyperband", "evolution"])
def test_every_method_makes_its_trials_once(method: str, pretended: Pretended, tmp_path: Path) -> None:
    done = carry_out(planned(method=method, budget="10 trials", population=3), out=tmp_path / "a", jobs=2)
    assert sorted(pretended.made) == [f"trial-{number:04d}" for number in range(10)]
    assert [trial.number for trial in done.search.trials] == list(range(10))
    best = done.search.best()
    assert best is not None
    ended = [trial.value for trial in done.search.trials if trial.state == "done"]
    assert best.value == max(value for value in ended if value is not None)
    assert done.search.importance in ({}, {"lr": pytest.approx(1.0)})


def test_a_grid_is_tried_whole(pretended: Pretended, tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.05, 0.2], "batch_size": {"from": 16, "to": 48, "step": 16}}
    done = carry_out(planned(space, method="grid", budget="99 trials"), out=tmp_path / "a", jobs=3)
    found = {(trial.parameters["lr"], trial.parameters["batch_size"]) for trial in done.search.trials}
    assert found == {(lr, size) for lr in (0.01, 0.05, 0.2) for size in (16, 32, 48)}
    assert len(done.search.trials) == 9
    best = done.search.best()
    assert best is not None
    assert best.parameters["lr"] == 0.05


def test_a_trial_whose_process_dies_is_begun_again_and_at_last_given_up(
    pretended: Pretended, tmp_path: Path
) -> None:
    pretended.deaths["trial-0001"] = 2
    pretended.deaths["trial-0003"] = 3
    done = carry_out(planned(), out=tmp_path / "a", jobs=1)
    assert sorted(pretended.made) == [f"trial-{number:04d}" for number in (0, 1, 2, 4, 5)]
    states = {trial.number: trial.state for trial in done.search.trials}
    assert states == {0: "done", 1: "done", 2: "done", 3: "failed", 4: "done", 5: "done"}
    assert done.search.trials[3].error == "its process ended with status -9"


@pytest.mark.parametrize("method", ["tpe", "evolution"])
def test_what_was_interrupted_goes_on_and_nothing_is_made_twice(
    method: str, pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.interrupt_at = 3
    folder = tmp_path / "a"
    first = carry_out(planned(method=method, population=3), out=folder, jobs=1)
    assert first.interrupted
    assert [trial.state for trial in first.search.trials] == ["done"] * 3 + ["running"]
    left = first.search.trials[3]
    pretended.interrupt_at = None
    monkeypatch.setattr(
        tuning, "this_process", lambda: ["elsewhere", 1, 1]
    )  # another process, while this one lives
    monkeypatch.setattr(tuning, "owner_lives", lambda owner, beat: owner[0] == "elsewhere")
    again = carry_out(read_plan(folder), resume=folder, jobs=2)
    assert not again.interrupted
    assert sorted(pretended.made) == [f"trial-{number:04d}" for number in (0, 1, 2, 3, 5, 6)]
    taken = next(trial for trial in again.search.trials if trial.folder == "trial-0003")
    assert taken.parameters == left.parameters
    assert len(again.search.trials) == 6
    assert {trial.state for trial in again.search.trials} == {"done"}
    carry_out(read_plan(folder), resume=folder, jobs=1)
    assert len(pretended.made) == 6


def test_an_owner_is_there_as_long_as_its_process() -> None:
    host, pid, started = tuning.this_process()
    assert tuning.owner_lives([host, pid, started], beat=0.0)
    assert not tuning.owner_lives([host, pid, started + 1], beat=1e12)  # another process has its number now
    assert not tuning.owner_lives([host, 2**22 + 1, started], beat=1e12)
    assert not tuning.owner_lives(["elsewhere", pid, started], beat=0.0)
    assert tuning.owner_lives(["elsewhere", pid, started], beat=1e12)


@pytest.mark.parametrize("method", ["random", "tpe", "hyperband"])
def test_who_resumes_draws_what_was_not_drawn_before(
    method: str, pretended: Pretended, tmp_path: Path
) -> None:
    what = planned(method=method, budget="12 trials")
    whole = carry_out(what, out=tmp_path / "whole", jobs=1)
    pretended.interrupt_at = len(pretended.made) + 5
    carry_out(what, out=tmp_path / "parts", jobs=1)
    pretended.interrupt_at = None
    parts = carry_out(read_plan(tmp_path / "parts"), resume=tmp_path / "parts", jobs=1)
    rates = [trial.parameters["lr"] for trial in parts.search.trials]
    assert len(set(rates)) == 12
    if method == "random":
        assert sorted(rates) == sorted(trial.parameters["lr"] for trial in whole.search.trials)


def test_a_trial_that_was_taken_and_not_drawn_has_parameters_of_its_own(
    pretended: Pretended, tmp_path: Path
) -> None:
    """As where a search is killed between the two."""
    import optuna

    what = planned(budget="6 trials")
    pretended.interrupt_at = 2
    carry_out(what, out=tmp_path / "a", jobs=1)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'a' / 'study.db'}")
    study.ask()
    pretended.interrupt_at = None
    done = carry_out(read_plan(tmp_path / "a"), resume=tmp_path / "a", jobs=1)
    rates = [trial.parameters["lr"] for trial in done.search.trials]
    assert len(rates) == len(set(rates)) == 6


@pytest.mark.parametrize(("budget", "trials"), [("5m", 5), ("250s", 5), ("1.6USD", 4), ("3 trials", 3)])
def test_a_budget_ends_a_search(budget: str, trials: int, pretended: Pretended, tmp_path: Path) -> None:
    """A simulated trial takes a virtual minute, and half a dollar."""
    what = planned(budget=budget, simulation={"cluster": "ut_austin"})
    done = carry_out(what, out=tmp_path / "a", jobs=1)
    assert len(done.search.trials) == len(pretended.made) == trials


def test_a_search_of_nothing_but_refusals_ends_though_they_cost_nothing(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_FRUITLESS", 4)
    refused = {"outcome": "refused", "error": "hogwild needs memory"}
    monkeypatch.setattr(pretended, "make", lambda task, judge=None: refused)
    with pytest.raises(RequestError, match="every trial was refused; the first: hogwild needs memory"):
        carry_out(planned(budget="5m"), out=tmp_path / "a", jobs=1)


@pytest.mark.parametrize("prune", ["median", "halving", "curve"])
def test_those_behind_are_ended_early_and_the_best_is_not(
    prune: str, pretended: Pretended, tmp_path: Path
) -> None:
    space = {"lr": [0.05, 0.04, 0.06, 0.03, 0.07, 1.0, 0.001, 0.002]}
    done = carry_out(
        planned(space, method="grid", budget="8 trials", prune=prune), out=tmp_path / "a", jobs=1
    )
    states = {trial.parameters["lr"]: trial.state for trial in done.search.trials}
    assert {states[lr] for lr in (1.0, 0.001, 0.002)} == {"stopped"}
    best = done.search.best()
    assert best is not None
    assert best.parameters["lr"] == 0.05
    assert all(len(trial.curve) < 9 for trial in done.search.trials if trial.state == "stopped")


def test_a_goal_of_seconds_wants_the_least_of_those_who_get_there(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(task: Mapping[str, Any], judge: Judge | None = None) -> dict[str, Any]:
        assert judge is None
        lr = rate(task["options"])
        return {"outcome": "done", "seconds": 100 * lr, "reached": lr >= 0.05, "epochs": 3}

    monkeypatch.setattr(pretended, "make", make)
    space = {"lr": [0.01, 0.05, 0.2]}
    options = {**JOB, "until": "top1=0.9"}
    done = carry_out(
        planned(space, method="grid", goal="seconds", options=options), out=tmp_path / "a", jobs=1
    )
    best = done.search.best()
    assert best is not None
    assert (best.parameters["lr"], best.value) == (0.05, pytest.approx(5.0))
    assert done.search.trials[0].value is None


def test_members_of_a_population_go_on_from_better_ones(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(task: Mapping[str, Any], judge: Judge | None = None) -> dict[str, Any]:
        pretended.tasks.append(task)
        value = hill({"optimizer": task["options"]["optimizer"]}, task["options"]["epochs"])
        return {"outcome": "done", "test_top1": value, "seconds": 1.0, "epochs": task["options"]["epochs"]}

    monkeypatch.setattr(pretended, "make", make)
    what = planned(method="pbt", budget="99 trials", population=5, interval=2, simulation={})
    done = carry_out(what, out=tmp_path / "a", jobs=1)
    trials = {trial.folder: trial for trial in done.search.trials}
    assert len(trials) == len(done.search.trials)
    lines: Counter[str] = Counter(trial.folder[:9] for trial in done.search.trials)
    assert lines == {f"member-{member:02d}": 5 for member in range(5)}  # 9 epochs by two
    copied = 0
    for trial, task in zip(done.search.trials, pretended.tasks, strict=True):
        if trial.parent is None:
            assert task["options"]["epochs"] == 2
            continue
        assert Path(task["begin_from"]).name == trial.parent
        epochs_before = next(
            each["options"]["epochs"] for each in pretended.tasks if Path(each["folder"]).name == trial.parent
        )
        assert task["options"]["epochs"] == min(epochs_before + 2, 9)
        if trial.parent[:9] != trial.folder[:9]:
            copied += 1
            before = max(
                (
                    each
                    for each in trials.values()
                    if each.folder[:9] == trial.folder[:9] and each.number < trial.number
                ),
                key=lambda each: each.number,
            )
            parent = trials[trial.parent].value
            assert parent is not None
            assert before.value is not None
            assert parent > before.value
            assert trial.parameters != before.parameters
        else:
            assert trial.parameters == trials[trial.parent].parameters
    assert copied >= 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "genetic"}, "unknown method 'genetic'"),
        ({"goal": "top2"}, "unknown goal 'top2'"),
        ({"prune": "all"}, "unknown rule of --prune"),
        ({"budget": "0 trials"}, "cannot read the budget"),
        ({"budget": "soon"}, "cannot read the budget"),
        ({"budget": "1.5 trials"}, "cannot read the budget"),
        ({"budget": "3USD", "simulation": {}}, "needs prices"),
        ({"goal": "seconds"}, "give --until"),
        (
            {"goal": "seconds", "method": "hyperband", "options": {**JOB, "until": "top1=0.9"}},
            "compares tests",
        ),
        ({"method": "hyperband", "prune": "median"}, "decides by itself"),
        ({"method": "pbt"}, "leave --cluster out"),
        ({"method": "pbt", "simulation": {}, "interval": 0}, "at least 1 epoch"),
        ({"method": "pbt", "simulation": {}, "space": {"batch_size": [8, 16]}}, "batch_size cannot change"),
        ({"method": "grid"}, "a grid cannot try all of lr"),
        ({"population": 1, "method": "evolution"}, "at least 2 members"),
        ({"space": {"strategy": ["synchronos", "downpour"]}}, "did you mean synchronous"),
        ({"space": {"lr": [0.1, -1]}}, "lr"),
        ({"simulation": {"cluster": "nowhere.yaml"}}, "nowhere.yaml"),
        ({"budget": "20USD"}, "not all hosts of cluster office have one"),
        (
            {"goal": "price", "options": {**JOB, "until": "top1=0.9"}},
            "--goal price needs prices, and not all hosts",
        ),
        ({"space": {"lr": 0.1, "strategy": ["local_sgd(steps={n})"], "n": 4}}, "leaves nothing to search"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        planned(**changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budget": "1s"}, "s on office, and the budget is 1s: give more, or fewer --epochs"),
        (
            {"budget": "0.00001USD", "simulation": {"cluster": "ut_austin"}},
            "USD on ut_austin, and the budget is",
        ),
        (
            {"method": "pbt", "budget": "3 trials", "population": 5, "simulation": {}},
            "a population of 5 takes 5 trials to begin with, and the budget is 3 trials",
        ),
        (
            {
                "budget": "1s",
                "simulation": {},
                "options": {"data": "synthetic(classes=9, size=64)", "epochs": 900},
            },
            "on this machine, and the budget is 1s",
        ),
    ],
)
def test_a_budget_too_small_for_a_trial_is_refused_in_a_line_and_nothing_is_written(
    changed: dict[str, Any],
    message: str,
    pretended: Pretended,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tuning, "measured_time", lambda job, start_method: 1e-3 * job.learning.epochs * 100)
    with pytest.raises(RequestError) as caught:
        carry_out(planned(**changed), out=tmp_path / "a")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()
    assert not pretended.made


def test_trials_that_may_end_early_need_less(pretended: Pretended, tmp_path: Path) -> None:
    """Nine epochs take about 5 s in the office, one a ninth of it."""
    with pytest.raises(RequestError, match="a trial takes at least"):
        carry_out(planned(budget="2s"), out=tmp_path / "a")
    assert carry_out(planned(budget="2s", method="hyperband"), out=tmp_path / "a").search.trials


def test_budgets_are_read_with_their_units() -> None:
    assert budget_of("60 trials") == Budget("trials", 60)
    assert budget_of("1.5h") == Budget("seconds", 5400)
    assert budget_of("20 USD") == Budget("USD", 20)


def test_a_folder_that_is_no_search_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not a search"):
        read_plan(tmp_path)


def test_trials_are_runs_and_the_best_is_a_recipe(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.1], "strategy": ["synchronous", "local_sgd(steps={period})"], "period": [4]}
    options = {**JOB, "epochs": 1}
    folder = tmp_path / "a"
    done = carry_out(planned(space, method="grid", options=options), out=folder, jobs=2)
    assert len(done.search.trials) == 4
    best = done.search.best()
    assert best is not None
    again = simulate(folder / "best.yaml", cluster="office", out=tmp_path / "again")
    assert again.figures["test_top1"] == best.value
    told = json.loads((folder / "search.json").read_text(encoding="utf-8"))
    assert told["best"]["number"] == best.number
    assert {trial["folder"] for trial in told["trials"]} == {f"trial-{number:04d}" for number in range(4)}
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Best trials" in page
    assert "local_sgd(steps=4)" in page
    assert "{period}" not in page.partition("Command")[0]
    assert f"{100 * best.value:.1f}" in page
    assert all((folder / trial.folder / "report.html").is_file() for trial in done.search.trials)


def test_a_search_whose_every_trial_is_refused_says_why(tmp_path: Path) -> None:
    what = planned({"strategy": "hogwild", "lr": [0.1, 0.2]}, method="grid", options={**JOB, "epochs": 1})
    with pytest.raises(RequestError, match=r"every trial was refused; the first: hogwild needs memory"):
        carry_out(what, out=tmp_path / "a", jobs=1)
    assert not (tmp_path / "a").exists()


NAMES = ["e01", "e02", "e12", "e03", "e13", "e23"]
CELLS: dict[str, Any] = {
    "model": f"cell_network({', '.join(f'{name}={{{name}}}' for name in NAMES)}, channels=4)",
    **{name: ["zero", "skip", "pool", "conv1", "conv3"] for name in NAMES},
}
"""A space of networks: of a trial's parameters each is an edge, and together they are its model."""


def test_networks_are_searched_as_any_option_is_and_the_best_is_a_model(
    pretended: Pretended, tmp_path: Path
) -> None:
    pretended.objective = lambda options, epoch: options["model"].count("conv3") / 6
    what = planned(CELLS, method="random", budget="5 trials", options={"data": "digits", "epochs": 1})
    done = carry_out(what, out=tmp_path / "a", jobs=1)
    best = done.search.best()
    assert best is not None
    described = best.options["model"]
    assert described.count("conv3") == round(6 * (best.value or 0.0))
    assert described == CELLS["model"].format(**best.parameters)
    assert described in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    model = create_model(described, classes=10, image_shape=(1, 8, 8))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
