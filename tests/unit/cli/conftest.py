from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polyrhythm.cli.main import _status

Refusal = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Refusal:
    """Runs a verb that must be refused in an empty folder; gives its one line of complaint."""
    folder = tmp_path_factory.mktemp("empty")
    monkeypatch.chdir(folder)

    def run(*arguments: str | Path) -> str:
        status = _status([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert status == 2, err
        assert out == ""
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert not list(folder.iterdir()), "something was written"
        return err.removeprefix("error: ").rstrip()

    return run
