"""What `polyrhythm profile` refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

WRONG = {
    "steps": (["--steps", "4"], "a median of 4 steps says little: measure at least 5"),
    "folder": (["--out", "nowhere/profile.yaml"], "there is no folder nowhere: make it first"),
    "model": (["--model", "lenet55", "--data", "digits"], "unknown model 'lenet55': did you mean lenet5"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_one_line(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused("profile", *arguments)
