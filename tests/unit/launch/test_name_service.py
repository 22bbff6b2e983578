from __future__ import annotations

import os

import pytest

from polyrhythm.launch.process import ask_names_briefly


def test_the_resolver_is_told_to_be_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "")  # so that it is put back
    monkeypatch.delenv("RES_OPTIONS")
    ask_names_briefly()
    assert os.environ["RES_OPTIONS"] == "timeout:1 attempts:1"


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "rotate")
    ask_names_briefly()
    assert os.environ["RES_OPTIONS"] == "rotate"
