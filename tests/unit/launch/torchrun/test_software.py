"""Ranks of torchrun whose hosts have other versions installed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.errors import PolyrhythmError, RequestError
from polyrhythm.launch.torchrun import software as module

PATIENCE_S = 20


def met(versions: list[str], monkeypatch: pytest.MonkeyPatch) -> list[PolyrhythmError | None]:
    """Return what each rank comes upon, in threads that share a store."""
    store, own = host_store(), threading.local()
    monkeypatch.setattr(module, "software", lambda: own.version)

    def rank(number: int) -> PolyrhythmError | None:
        own.version = versions[number]
        try:
            module.check_software(local(number, len(versions), store.port), range(len(versions)))
        except PolyrhythmError as error:
            return error
        return None

    with ThreadPoolExecutor(len(versions)) as pool:
        return [
            each.result(PATIENCE_S) for each in [pool.submit(rank, number) for number in range(len(versions))]
        ]


def test_another_version_on_one_host_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    older, newer = "0.9.0, torch 2.12.1, messages 1", "0.9.0, torch 2.13.0, messages 1"
    found = met([newer, older, newer], monkeypatch)
    assert {type(error) for error in found} == {RequestError}
    assert {str(error) for error in found} == {
        f"ranks run different software: Polyrhythm {older} on ranks 1; Polyrhythm {newer} on ranks 0,2: install the "
        "same on all hosts"
    }
    assert met([newer] * 2, monkeypatch) == [None] * 2


def test_the_kind_of_device_that_torch_is_built_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    told = set()
    for build in ("2.13.0", "2.13.0+cpu", "2.13.0+cu126"):
        monkeypatch.setattr(module.torch, "__version__", build)
        told.add(module.software())
    assert len(told) == 1
    assert "torch 2.13.0, messages" in told.pop()
