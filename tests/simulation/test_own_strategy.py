"""The strategy that docs/tutorials/own-strategy.md shows runs as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyrhythm

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-strategy.md"


def test_it_sends_half_of_what_synchronous_does(tmp_path: Path) -> None:
    block = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {"__name__": "own", "out": tmp_path / "own"}
    exec(block, found)
    own = found["run"].figures
    job: Any = {"data": "digits", "model": "mlp", "epochs": 1, "workers": 2}
    every = polyrhythm.simulate(
        cluster="office", strategy="synchronous", out=tmp_path / "every", **job
    ).figures
    assert 0.4 < own["bytes_sent_per_step"] / every["bytes_sent_per_step"] < 0.6
    assert own["test_top1"] > 0.2
