"""An adapter whose library is not installed says in one line what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from polyrhythm.errors import RequestError


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [
        ("lightning", "lightning.pytorch.strategies"),
        ("accelerate", "accelerate"),
        ("transformers", "transformers"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    adapter: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"polyrhythm.adapters.{adapter}", raising=False)
    with pytest.raises(RequestError, match=rf"not installed: pip install polyrhythm\[{adapter}\]"):
        importlib.import_module(f"polyrhythm.adapters.{adapter}")
