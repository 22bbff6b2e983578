"""What is said of a run before it starts, and where it learns nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import polyrhythm
from polyrhythm.api.train import expected_time, measured_time, too_few_steps
from polyrhythm.cli.train import _print_result as print_result
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.evaluation.evaluate import Evaluation, evaluate_scores
from polyrhythm.events import Evaluated, Event, Notice
from polyrhythm.reporting.event_log import read_events
from polyrhythm.roles.job import CheckpointConfig, Job


def _job(count: int, side: int, epochs: int) -> Job:
    images, labels = torch.zeros(count, 1, side, side), torch.arange(count) % 10
    config = configure({"data": ((images, labels), (images, labels)), "model": "mlp", "epochs": epochs})
    return assemble(config, CheckpointConfig())


def test_the_time_of_a_short_run_is_said_and_of_a_long_one_what_is_quicker() -> None:
    job = _job(20, 64, 3)
    assert expected_time(job, 90) == (
        "about 0:01:30 on this machine, by one measured step: 3 epochs of 20 images at 64 by 64 pixels"
    )
    told = expected_time(job, 7200)
    assert "--image-size 32 takes about 0:30:00" in told
    assert "--fine-tuning head" in told


def test_one_step_is_measured_where_there_is_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_time(_job(20, 64, 3), "fork") is None  # soon done
    assert measured_time(_job(20, 16, 200_000), "fork") is None  # small pictures
    told = measured_time(_job(20, 64, 10_000), "fork")
    assert told is not None
    assert told > 0
    # of measurements that are known: forward passes of the test, and steps
    monkeypatch.setattr("polyrhythm.api.train.call_in_process", lambda *_: (0.25, 0.5))
    assert measured_time(_job(20, 64, 10_000), "fork") == 10_000 * 20 * (0.5 + 0.25)


def _tested(scores: torch.Tensor, labels: torch.Tensor) -> Evaluation:
    return evaluate_scores(lambda indices: scores[indices], labels, classes=["a", "b", "c", "d"])


def test_guessing_is_known_by_the_entropy_and_the_largest_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 10 + [3] * 10)
    frequencies = torch.tensor([0.5, 0.3, 0.1, 0.1]).log().expand(100, 4)
    assert "loss 1.168 (guessing: 1.168), top-1 50.0 % (50.0 %)" in _tested(frequencies, labels).guesses
    diverged = torch.zeros(100, 4)
    diverged[:, 3] = 50
    assert "hardly does better than guessing" in _tested(diverged, labels).guesses
    sure = 10 * torch.nn.functional.one_hot(labels, 4).float()
    assert _tested(sure, labels).guesses == ""
    overfitted = sure * 20  # right on most, and far too sure where it is wrong
    overfitted[::5] = overfitted[::5].roll(1, 1)
    found = _tested(overfitted, labels)
    assert found.loss > 2
    assert found.guesses == ""
    assert (
        _tested(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)).guesses == ""
    )  # one class: nothing to guess


class _Notices:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.texts.append(event.text)

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("rate", "times"), [(1e-7, 1), (0.05, 0)])
def test_a_run_that_learns_nothing_says_so_once(rate: float, times: int, tmp_path: Path) -> None:
    notices = _Notices()
    polyrhythm.simulate(
        cluster="office",
        data="digits",
        model="mlp",
        workers=2,
        epochs=8,
        optimizer=f"sgd(lr={rate})",
        out=tmp_path / "run",
        observers=[notices],
    )
    told = [text for text in notices.texts if "hardly does better than guessing" in text]
    assert len(told) == times
    assert all(text.startswith("after epoch 2 ") for text in told)


def test_few_steps_of_few_pictures_are_told_and_what_makes_more(tmp_path: Path) -> None:
    for number in range(30):
        path = tmp_path / "photographs" / ("left" if number % 2 else "right") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (8 * number, 0, 0)).save(path)
    given = {"data": str(tmp_path / "photographs"), "model": "mlp", "image_size": 16}

    def told(**more: object) -> str | None:
        config = configure({**given, **more})
        return too_few_steps(assemble(config, CheckpointConfig()).planned, config)

    # 24 pictures to learn from, by 2 workers: a step an epoch, and with 8 a worker two
    assert told() == (
        "20 steps in all, 1 step an epoch, are few for a network that starts from random weights: --batch-size 8 makes "
        "40 of the same images"
    )
    assert told(batch_size=16) is None  # whoever says how to learn
    pair = (torch.zeros(24, 1, 16, 16), torch.arange(24) % 2)
    assert told(data=(pair, pair), image_size=None) is None


def test_the_highest_test_stands_beside_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = polyrhythm.simulate(
        cluster="office", data="digits", model="mlp", workers=2, epochs=2, out=tmp_path / "run",
        optimizer="sgd(lr=0.1)",
    )  # fmt: skip
    tested = [each for each in read_events(run.folder / "events.jsonl") if isinstance(each, Evaluated)]
    highest = max(tested, key=lambda each: each.test_top1)
    assert run.figures["best"] == {"epoch": highest.epoch, "test_top1": highest.test_top1}

    print_result(run.folder, {**run.figures, "best": {"epoch": 1, "test_top1": 0.99}, "test_top1": 0.95})
    assert "highest     top-1 99.0 % after epoch 1" in capsys.readouterr().out
    print_result(run.folder, {**run.figures, "best": {"epoch": 2, "test_top1": 0.95}, "test_top1": 0.95})
    assert "after epoch 2" not in capsys.readouterr().out
