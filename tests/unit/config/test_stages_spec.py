"""Strategies of strategies: how they are written, and where each of them ends."""

from __future__ import annotations

import pytest

from polyrhythm.config.stages import Stage, Stages
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target


def test_stages_are_read_and_written() -> None:
    text = 'stages("synchronous until 0.1; local_sgd(steps=4) until 8 epochs; parameter_server(servers=1)")'
    read = Stages.parse(text)
    assert read == Stages(
        (
            Stage("synchronous", 0.1),
            Stage("local_sgd(steps=4)", 8.0),
            Stage("parameter_server(servers=1)"),
        )
    )
    assert str(read) == text
    assert read.ends(20) == [2, 8, 20]
    assert Stages.parse("stages(synchronous until .5; d_psgd)").ends(4) == [2, 4]  # type: ignore[union-attr]
    target = 'stages("synchronous until top1=0.8; easgd until 0.75; local_sgd")'
    until = Stages.parse(target)
    assert until is not None
    assert str(until) == target
    assert until.stages[0] == Stage("synchronous", target=Target("top1", 0.8))
    assert until.ends(4) == [None, 3, 4]
    assert Stages.parse("synchronous") is None
    assert Stages.parse("pipeline(stages=4)") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stages(synchronous)", "at least two strategies"),
        ("stages(synchronous; local_sgd)", "only the last stage has no end"),
        ("stages(synchronous until 0.5; local_sgd until 0.9)", "the last stage lasts to the end"),
        ("stages(synchronous until dawn; local_sgd)", "cannot read until 'dawn'"),
        ("stages(synchronous until top1=2; local_sgd)", "cannot read the target 'top1=2'"),
        ("stages(synchronous until 0 epochs; local_sgd)", "no epoch"),
        ("stages(')", "cannot read"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        Stages.parse(text)


@pytest.mark.parametrize("until", ["0.01", "5 epochs", "4 epochs", "0.99"])
def test_no_stage_is_empty(until: str) -> None:
    read = Stages.parse(f"stages(synchronous until {until}; local_sgd)")
    assert read is not None
    with pytest.raises(RequestError, match=r"without one; give more --epochs"):
        read.ends(4)
