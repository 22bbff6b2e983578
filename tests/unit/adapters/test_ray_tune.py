"""What a trial of Ray Tune's is told, by the options of all trials and what Ray has drawn for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.errors import RequestError, RunError

pytest.importorskip("ray.tune")

from polyrhythm.adapters import ray_tune


class Process:
    """Stands for the process that makes the run of a trial: three epochs, of which each is tested."""

    def __init__(self, tasks: list[Any], answer: dict[str, Any]) -> None:
        self._tasks, self._answer = tasks, answer
        self.pid = 0

    def make(self, task: Any, judge: Any) -> dict[str, Any]:
        self._tasks.append(task)
        for epoch in (1, 2, 3):
            judge(epoch, {"top1": epoch / 10, "top5": 1.0, "loss": 1.0})
        return self._answer

    def close(self) -> None:
        self._tasks.append("closed")


class Context:
    def get_trial_id(self) -> str:
        return "a1b2_00000"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    def carry_out(settings: dict[str, Any], answer: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        tasks: list[Any] = []
        told: list[Any] = []
        monkeypatch.setattr(ray_tune, "RunProcess", lambda: Process(tasks, answer))
        monkeypatch.setattr(ray_tune.tune, "get_context", Context)
        monkeypatch.setattr(ray_tune.tune, "report", told.append)
        ray_tune.trainable(data="digits", model="mlp", out="/shared/search", **options)(settings)
        return tasks, told

    return carry_out


DONE = {
    "outcome": "done", "epochs": 3, "test_top1": 0.3, "test_top5": 1.0, "test_loss": 1.0, "seconds": 7.0,
    "images_per_s": None,
}  # fmt: skip


def test_every_test_is_reported_and_the_last_one_with_the_figures_of_the_whole_run(tried: Any) -> None:
    (task, closed), told = tried({"lr": 0.2}, DONE, epochs=3)
    assert task["folder"] == "/shared/search/a1b2_00000"
    assert closed == "closed"
    assert [each["epoch"] for each in told] == [1, 2, 3]
    assert [each["top1"] for each in told] == [0.1, 0.2, 0.3]
    assert told[-1] == {
        "epoch": 3, "top1": 0.3, "top5": 1.0, "loss": 1.0, "seconds": 7.0, "folder": "/shared/search/a1b2_00000",
    }  # fmt: skip


def test_rates_names_in_braces_and_seeds_become_options_of_the_run(tried: Any) -> None:
    settings = {"lr": 0.2, "strategy": "local_sgd(steps={period})", "period": 4, "seed": 7, "workers": 3}
    (task, _), _ = tried(settings, DONE, optimizer="sgd(momentum=0.5)", workers=2)
    assert task["options"] == {
        "data": "digits", "model": "mlp", "threads": 1, "seed": 7, "workers": 3,
        "strategy": "local_sgd(steps=4)", "optimizer": "sgd(momentum=0.5, lr=0.2)",
    }  # fmt: skip
    assert task["simulation"] == {}


def test_a_trial_that_is_simulated_keeps_the_threads_of_the_simulator(tried: Any, tmp_path: Path) -> None:
    (task, _), _ = tried({}, DONE, cluster="office")
    assert task["simulation"] == {"cluster": "office"}
    assert "threads" not in task["options"]


@pytest.mark.parametrize(
    ("options", "settings", "asked"),
    [
        ({"workers": 2}, {}, {"CPU": 2}),
        ({"workers": 2, "threads": 3}, {}, {"CPU": 6}),
        ({"workers": 2, "gpus": 1}, {"workers": 4}, {"CPU": 4, "GPU": 1}),
        ({"workers": 8, "cluster": "office"}, {}, {"CPU": 1}),
    ],
)
def test_ray_is_asked_for_a_core_a_worker_and_thread(
    options: dict[str, Any], settings: dict[str, Any], asked: dict[str, float]
) -> None:
    trial = ray_tune.trainable(data="digits", model="mlp", out="runs/search", **options)
    assert trial._resources(settings).required_resources == asked


def test_a_choice_that_cannot_be_ends_its_trial_with_the_reason(tried: Any) -> None:
    with pytest.raises(RequestError, match="learning_rate"):
        tried({"learning_rate": 0.1}, DONE)
    with pytest.raises(RequestError, match="a rate above 0"):
        tried({}, {"outcome": "refused", "error": "a rate above 0"})
    with pytest.raises(RunError, match="out of memory"):
        tried({}, {"outcome": "failed", "error": "out of memory"})


def test_what_no_trial_could_have_is_refused_before_ray_begins() -> None:
    with pytest.raises(RequestError, match="epoch"):
        ray_tune.trainable(data="digits", model="mlp", out="runs/search", epochs=0)
