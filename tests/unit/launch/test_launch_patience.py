"""Waiting with words."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from polyrhythm.errors import RunError
from polyrhythm.launch import patience
from polyrhythm.launch.patience import await_key, speaking_up


class Slow:
    """A store in which waiting takes too long twice."""

    def __init__(self, error: type[Exception] = dist.DistStoreError) -> None:
        self.waits = 0
        self.error = error

    def wait(self, keys: list[str], timeout: object) -> None:
        self.waits += 1
        if self.waits < 3:
            raise self.error("no such key")

    def get(self, key: str) -> bytes:
        return f"value of {key}".encode()


def test_waits_as_long_as_it_takes_and_says_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assert await_key(Slow(), "k", "rank 3 to join") == "value of k"
    assert capsys.readouterr().err.splitlines() == ["polyrhythm: still waiting for rank 3 to join"] * 2


def test_a_store_that_is_gone_is_an_error() -> None:
    with pytest.raises(RunError, match="the store is gone while waiting for rank 3 to join: no such key"):
        await_key(Slow(dist.DistNetworkError), "k", "rank 3 to join")


def test_a_real_store_times_out_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "SPEAK_AFTER_S", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = store.clone()
    say = patience._say

    def said(text: str) -> None:
        say(text)
        client.set("k", "here")

    monkeypatch.setattr(patience, "_say", said)
    assert await_key(store, "k", "rank 1 to join") == "here"
    assert "still waiting for rank 1 to join" in capsys.readouterr().err


def test_speaks_up_once_only_if_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Event()

    def words() -> str:
        asked.set()
        return ""

    with speaking_up(words, after_s=60):
        pass
    assert not asked.is_set()
    with speaking_up(words, after_s=0.001):
        assert asked.wait(10)
    assert capsys.readouterr().err == ""
