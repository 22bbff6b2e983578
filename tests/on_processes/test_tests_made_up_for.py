"""A run that was killed between an epoch's checkpoint and its test is tested when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.api.train import train
from polyrhythm.events import Evaluated
from polyrhythm.reporting.event_log import read_events


def results_of(folder: Path) -> list[tuple[int, float, float]]:
    events = read_events(folder / "events.jsonl")
    return [
        (event.epoch, event.test_loss, event.test_top1) for event in events if isinstance(event, Evaluated)
    ]


@pytest.mark.parametrize(
    "strategy", ["synchronous", "parameter_server(servers=1, consistency=synchronous)", "local_sgd(steps=4)"]
)
def test_the_test_that_was_lost_is_made_up_for(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(
        data="digits",
        model="mlp(hidden=[4])",
        strategy=strategy,
        workers=2,
        threads=1,
        epochs=3,
        keep_checkpoints=3,
        out=folder,
        start_method="fork",
    )
    whole = results_of(folder)
    assert [epoch for epoch, _, _ in whole] == [1, 2, 3]

    newest = sorted((folder / "checkpoints").glob("step-*.safetensors"))[-1]
    newest.unlink()
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    before = next(
        number for number, line in enumerate(lines) if '"evaluated"' in line.lower() and '"epoch": 2' in line
    )
    (folder / "events.jsonl").write_text("".join(lines[:before]))
    assert [epoch for epoch, _, _ in results_of(folder)] == [1]

    train(resume=folder, start_method="fork")
    assert results_of(folder) == whole
    train(resume=folder, start_method="fork", epochs=4)
    assert [epoch for epoch, _, _ in results_of(folder)] == [1, 2, 3, 4]
