"""An adapter whose library is not installed says in one line what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from polyrhythm.errors import RequestError


@pytest.mark.parametrize(
    ("adapter", "missing", "extra"),
    [
        ("lightning", "lightning.pytorch.strategies", "lightning"),
        ("accelerate", "accelerate", "accelerate"),
        ("transformers", "transformers", "transformers"),
        ("ray_tune", "ray", "ray"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    adapter: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"polyrhythm.adapters.{adapter}", raising=False)
    with pytest.raises(RequestError, match=rf"not installed: pip install polyrhythm\[{extra}\]"):
        importlib.import_module(f"polyrhythm.adapters.{adapter}")
