"""Runs of several strategies, one after the other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrhythm.api.simulate import simulate
from polyrhythm.api.train import train
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, Notice, RunEnded, RunStarted
from polyrhythm.reporting.comparison import read_run
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.figures import RunFigures, as_one_run

JOB: dict[str, Any] = {"cluster": "office", "data": "digits", "model": "mlp", "epochs": 4, "workers": 4}
STAGES = 'stages("synchronous until 0.5; {}")'


class Seen:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def test_synchronous_and_then_local_steps_is_post_local_sgd(tmp_path: Path) -> None:
    """Bit for bit: parameters, momenta, schedule, order of images and numbers of steps are handed over."""
    options = {**JOB, "optimizer": "sgd(lr=0.1, momentum=0.9)", "balance": "off"}
    staged = simulate(**options, strategy=STAGES.format("local_sgd(steps=4)"), out=tmp_path / "staged")
    other = simulate(**options, strategy="post_local_sgd(after=0.5, steps=4)", out=tmp_path / "other")
    assert staged.figures["parameters_sha256"] == other.figures["parameters_sha256"]
    assert staged.figures["steps"] == other.figures["steps"]


@pytest.mark.parametrize(
    ("first", "second"), [("synchronous", "parameter_server"), ("parameter_server", "synchronous")]
)
def test_a_run_of_stages_is_one_run(first: str, second: str, tmp_path: Path) -> None:
    seen = Seen()
    spec = f'stages("{first} until 0.5; {second}")'
    run = simulate(**JOB, strategy=spec, out=tmp_path / "run", observers=[seen])
    assert (run.outcome, run.figures["strategy"], run.figures["epochs"]) == ("done", spec, 4)
    assert run.figures["stages"] == [
        {"strategy": first, "epochs": 2},
        {"strategy": second, "epochs": 2},
    ]
    assert (sum(isinstance(event, RunEnded) for event in seen.events), seen.closed) == (1, 1)
    told = [event.text for event in seen.events if isinstance(event, Notice)]
    assert f"{second} continues from the model of {first} after 2 epochs, with its optimizer's state" in told
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["strategy"] == spec
    figures = RunFigures.of(as_one_run(read_events(tmp_path / "run/events.jsonl")))
    assert figures.images_seen == 4 * len(open_data("digits").train)
    assert (tmp_path / "run/report.html").is_file()
    tests = read_run(tmp_path / "run").tests
    assert [test.event.epoch for test in tests] == [1, 2, 3, 4]
    assert tests[2].event.test_top1 > tests[1].event.test_top1 - 0.1  # and not as at the beginning
    times = [test.event.time_s for test in tests]
    assert times == sorted(times)
    starts = [event for event in seen.events if isinstance(event, RunStarted)]
    assert [(start.epochs, start.start_epoch) for start in starts] == [(4, 0), (4, 2)]


def test_stages_that_cannot_be_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for strategy, more, complaint in [
        (STAGES.format("nothing"), {}, "strategy"),
        (STAGES.format("local_sgd"), {"epochs": 1}, "without one"),
        (STAGES.format("local_sgd"), {"faults": "kill(rank=1, at_s=2)"}, "faults"),
    ]:
        with pytest.raises(RequestError, match=re.escape(complaint)):
            simulate(**JOB | more, strategy=strategy, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_stage_ends_after_the_test_that_reaches_its_target(tmp_path: Path) -> None:
    """The second strategy begins where the first was good enough, and the rest is a run of ordinary stages."""
    plain = simulate(**JOB, strategy="synchronous", out=tmp_path / "plain")
    tops = [test.event.test_top1 for test in read_run(plain.folder).tests]
    goal = (tops[0] + tops[1]) / 2
    run = simulate(
        **JOB,
        strategy=f'stages("synchronous until top1={goal:.4f}; local_sgd(steps=4)")',
        out=tmp_path / "run",
    )
    assert run.figures["stages"] == [
        {"strategy": "synchronous", "epochs": 2},
        {"strategy": "local_sgd(steps=4)", "epochs": 2},
    ]
    share = simulate(**JOB, strategy=STAGES.format("local_sgd(steps=4)"), out=tmp_path / "share")
    assert run.figures["parameters_sha256"] == share.figures["parameters_sha256"]


def test_a_stage_that_never_gets_there_is_the_last_one(tmp_path: Path) -> None:
    seen = Seen()
    run = simulate(
        **JOB,
        strategy='stages("synchronous until top1=1; local_sgd")',
        out=tmp_path / "run",
        observers=[seen],
    )
    assert run.figures["stages"] == [{"strategy": "synchronous", "epochs": 4}]
    plain = simulate(**JOB, strategy="synchronous", out=tmp_path / "plain")
    assert run.figures["parameters_sha256"] == plain.figures["parameters_sha256"]
    assert (sum(isinstance(event, RunEnded) for event in seen.events), seen.closed) == (1, 1)
    assert (tmp_path / "run/report.html").is_file()


def test_a_target_ends_all_stages(tmp_path: Path) -> None:
    spec = STAGES.format("local_sgd(steps=4)")
    whole = simulate(**JOB, strategy=spec, out=tmp_path / "whole")
    first, second, third, _ = [test.event.test_top1 for test in read_run(whole.folder).tests]
    for goal, epochs, stages in ((first, 1, 1), ((second + third) / 2, 3, 2)):
        seen, out = Seen(), tmp_path / str(epochs)
        run = simulate(**JOB, strategy=spec, until=f"top1={goal:.4f}", out=out, observers=[seen])
        assert (int(run.figures["epochs"]), len(run.figures["stages"])) == (epochs, stages)
        assert sum(isinstance(event, RunEnded) for event in seen.events) == 1
        assert (out / "report.html").is_file()


def test_real_stages_go_on_where_they_were(tmp_path: Path) -> None:
    """Trains for real; then the second stage alone, from the first one's checkpoint."""
    options: dict[str, Any] = {
        "data": "digits",
        "model": "mlp",
        "epochs": 2,
        "workers": 2,
        "start_method": "fork",
    }
    spec = STAGES.format("synchronous(collective=ring)")
    run = train(**options, strategy=spec, out=tmp_path / "run")
    assert run is not None
    assert (run.outcome, run.figures["epochs"], run.figures["strategy"]) == ("done", 2, spec)
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    newest = max((tmp_path / "cut/checkpoints").iterdir())
    newest.unlink()
    lines = (tmp_path / "cut/events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut/events.jsonl").write_text("".join(lines[:-1]))
    again = train(resume=tmp_path / "cut", start_method="fork")
    assert again is not None
    assert again.figures["parameters_sha256"] == run.figures["parameters_sha256"]
    with pytest.raises(RequestError, match="has done its 2 epochs"):
        train(resume=tmp_path / "cut", start_method="fork")
