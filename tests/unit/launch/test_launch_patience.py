"""Waiting with words."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch.distributed as dist

from polyrhythm.errors import RunError
from polyrhythm.launch import patience
from polyrhythm.launch.patience import Patience, speaking_up


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


class Broken(dist.HashStore):
    """A store that does not answer in time once, and then is gone."""

    errors: ClassVar = [dist.DistNetworkError("no such host\nat all"), dist.DistStoreError("timeout")]

    def check(self, keys: list[str]) -> bool:
        raise self.errors.pop()


def test_says_for_whom_it_waits_and_goes_on(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "SPEAK_AFTER_S", 0.01)
    asked: list[int] = []

    def again() -> None:
        asked.append(1)
        if len(asked) == 2:
            store.set("k", "here")

    assert Patience().key(store, "k", 3, again) == "here"
    assert capsys.readouterr().err.splitlines() == ["polyrhythm: still waiting for rank 3 to join"] * 2


def test_who_waits_for_all_names_those_who_are_absent(store: dist.Store) -> None:
    for rank in (1, 2, 4):
        store.set(f"host/{rank}", str(rank))
    vain = r"^ranks 3 and 5 have not joined within 0\.05 s: see what .* or give it longer with --gather-s$"
    with pytest.raises(RunError, match=vain):  # rank 0 itself waits for them
        Patience(0.05).keys(store, lambda rank: f"host/{rank}", range(6))
    for rank in (3, 5):
        store.set(f"host/{rank}", str(rank))
    with pytest.raises(RunError, match=r"^rank 0 has not joined within 0\.05 s: "):
        Patience(0.05).keys(store, lambda rank: f"host/{rank}", range(6))
    store.set("host/0", "0")
    assert Patience(0.05).keys(store, lambda rank: f"host/{rank}", range(6)) == list("012345")


def test_one_patience_is_for_all_that_is_waited_for(store: dist.Store) -> None:
    left = Patience(0.05)
    with pytest.raises(RunError, match="rank 1 has not"):
        left.word(store, "calls", lambda: [1])
    store.queue_push("calls", b"word")
    assert left.word(store, "calls", lambda: [1]) == "word"  # what is there needs none
    looks: list[int] = []
    with pytest.raises(RunError, match="rank 2 has not"):
        left.looking(lambda: looks.append(1)).key(store, "k", 2)
    assert looks == [1]


def test_a_store_that_is_gone_is_an_error_and_a_slow_one_is_not() -> None:
    with pytest.raises(
        RunError, match=r"^the store is gone while waiting for other ranks to join: no such host$"
    ):
        Patience().key(Broken(), "k", 1)
    assert not Broken.errors


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
