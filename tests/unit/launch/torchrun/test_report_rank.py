from __future__ import annotations

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.launch.torchrun.report_rank import (
    ReportedByLeader,
    is_silent,
    leader_speaks,
    leads,
    started_by_torchrun,
)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name, value in {"RANK": str(request.param), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


def refuse() -> None:
    with leader_speaks():
        raise RequestError("unknown data")


def test_without_torchrun_everybody_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not started_by_torchrun()
    assert not is_silent()
    with pytest.raises(RequestError, match="unknown data"):
        refuse()


@pytest.mark.parametrize("rank", [0], indirect=True)
@pytest.mark.usefixtures("rank")
def test_rank_0_speaks() -> None:
    assert leads()
    with pytest.raises(RequestError, match="unknown data"):
        refuse()


@pytest.mark.parametrize("rank", [1], indirect=True)
@pytest.mark.usefixtures("rank")
def test_the_others_leave_it_to_rank_0() -> None:
    assert is_silent()
    with pytest.raises(ReportedByLeader):
        refuse()


@pytest.mark.parametrize("rank", [1], indirect=True)
@pytest.mark.usefixtures("rank")
def test_a_bug_is_everybodys() -> None:
    with pytest.raises(ZeroDivisionError), leader_speaks():
        print(1 / 0)
