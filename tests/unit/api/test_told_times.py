"""What is said of a run before it starts, and where it learns nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyrhythm
from polyrhythm.api.train import expected_time, measured_time
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.evaluation.evaluate import Evaluation, evaluate_scores
from polyrhythm.events import Event, Notice
from polyrhythm.roles.job import CheckpointConfig, Job


def _job(count: int, side: int, epochs: int) -> Job:
    images, labels = torch.zeros(count, 1, side, side), torch.arange(count) % 10
    config = configure({"data": ((images, labels), (images, labels)), "model": "mlp", "epochs": epochs})
    return assemble(config, CheckpointConfig())


def test_the_time_of_a_short_run_is_said_and_of_a_long_one_what_is_quicker() -> None:
    job = _job(20, 64, 3)
    assert expected_time(job, 90) == (
        "about 0:01:30 on this machine, by one measured step: 3 epochs of 20 pictures at 64 by 64 pixels"
    )
    told = expected_time(job, 7200)
    assert "--image-size 32 takes about 0:30:00" in told
    assert "--fine-tuning head" in told


def test_one_step_is_measured_where_there_is_much_to_do() -> None:
    assert measured_time(_job(20, 64, 3), "fork") is None  # soon done
    assert measured_time(_job(20, 16, 200_000), "fork") is None  # small pictures
    once, twice = (measured_time(_job(20, 64, epochs), "fork") for epochs in (10_000, 1_000_000))
    assert once is not None
    assert twice is not None
    assert once > 0
    assert 10 < twice / once < 1000  # a hundred times as long, by measurements


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
