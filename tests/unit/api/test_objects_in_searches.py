"""Verbs that start runs from files refuse objects in one line, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyrhythm
from polyrhythm.errors import RequestError

VERBS: dict[str, Callable[..., Any]] = {
    "compare": lambda **given: polyrhythm.compare(strategies="synchronous", workers=[2], **given),
    "plan": lambda **given: polyrhythm.plan(
        target="top1=0.5", strategies="synchronous", workers=[2], **given
    ),
    "tune": lambda **given: polyrhythm.tune(space={"batch_size": [16, 32]}, budget="2 trials", **given),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("key", ["model", "data"])
def test_an_object_is_refused_in_one_line(tmp_path: Path, verb: str, key: str) -> None:
    images, labels = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    objects = {"model": nn.Flatten(), "data": ((images, labels), (images, labels))}
    if verb == "tune":
        pytest.importorskip("optuna")
    given = {"data": "digits", "model": "mlp", "epochs": 1, key: objects[key]}
    with pytest.raises(
        RequestError, match=rf"^{verb} starts its runs from files, so {key} must be text or numbers"
    ):
        VERBS[verb](cluster="office", out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
