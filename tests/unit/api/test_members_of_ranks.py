"""An ensemble whose members share out the ranks that torchrun has started: who is where, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.api import members
from polyrhythm.api.members import shared_ranks, train_ensemble_of_ranks
from polyrhythm.api.observed_run import Run
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    PREFIX,
    from_environment,
    host_store,
)
from polyrhythm.config.ensemble import Ensemble
from polyrhythm.config.recipe import CONFIG_FILE, configure
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.launch.torchrun.gathering import RETURN_VARIABLE
from polyrhythm.launch.torchrun.started_rank import as_group

JOB = {"data": "digits", "model": "mlp", "epochs": 1}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of four ranks, as whoever starts lost ranks again one by one has it; this process is rank 3."""
    hosted = host_store()
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(hosted.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RETURN_VARIABLE: "1",
    }.items():
        monkeypatch.setenv(name, value)
    return dist.PrefixStore(PREFIX, hosted)


def ensemble_of(members_: int, each: str = "synchronous") -> tuple[Ensemble, RunConfig]:
    ensemble = Ensemble(members_, each)
    return ensemble, configure({**JOB, "strategy": str(ensemble)})


def test_groups_of_ranks_have_keys_of_their_own(store: Any) -> None:
    with as_group("e/member-0", 0, 1, 2):
        first = from_environment()
        first.store.set("key", "of member 0")
    with as_group("e/member-1", 2, 1, 2):
        second = from_environment()
        assert (second.rank, second.size) == (1, 2)
        assert not second.store.check(["key"])
    assert from_environment().rank == 3
    assert first.store.check(["key"])


@pytest.mark.parametrize(("first", "rank", "keeps"), [(0, 0, True), (2, 0, False), (0, 1, False)])
def test_the_first_of_all_ranks_alone_keeps_their_store(
    first: int, rank: int, keeps: bool, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with as_group("e/member", first, rank, 2):
        assert from_environment().keeper is keeps


@pytest.mark.parametrize(
    ("count", "each", "asked", "line"),
    [
        (
            3,
            "synchronous",
            None,
            "torchrun's 4 processes cannot be shared out equally among 3 members of sy.*: start 3",
        ),
        (4, "parameter_server(servers=1)", None, "among 4 members of parameter_server.*: start 8"),
        (2, "synchronous", 8, "torchrun's processes leave 4 workers, not 8: omit --workers"),
        (2, "synchronus", None, "did you mean synchronous"),
    ],
)
def test_ranks_that_cannot_be_shared_out_are_refused(
    count: int, each: str, asked: int | None, line: str, store: Any
) -> None:
    with pytest.raises(RequestError, match=line):
        shared_ranks(*ensemble_of(count, each), asked)


def test_each_member_has_its_ranks_and_each_rank_its_share_of_a_host(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble, config = ensemble_of(2, "parameter_server(servers=1)")
    told = shared_ranks(ensemble, config, None)
    assert told.workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(members, "available_cores", lambda: 6)
    (tmp_path / CONFIG_FILE).write_text("")
    store.set("ensemble/folder", str(tmp_path))
    store.set("ensemble/next", "student")
    made: list[tuple[Any, ...]] = []

    def make(folder: Path, options: dict[str, Any], observers: Sequence[Any]) -> Run | None:
        own = from_environment()
        made.append((folder, own.rank, own.size, options["seed"], options["strategy"], options["threads"]))
        return None

    given = told.model_copy(update={"distill": "mlp"})
    assert train_ensemble_of_ranks(ensemble, given, _nowhere, (), make) is None
    each = "parameter_server(servers=1)"
    assert made == [(tmp_path / "member-1", 1, 2, 1, each, 3), (tmp_path / "student", 3, 4, 0, each, 3)]


def test_a_folder_that_a_host_does_not_see_is_refused(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_SEEN_S", 0.0)
    store.set("ensemble/folder", str(tmp_path / "elsewhere"))
    with pytest.raises(
        RequestError, match=r"rank 3 does not see .*: give --out a folder that all hosts share"
    ):
        train_ensemble_of_ranks(*ensemble_of(2), _nowhere, (), lambda *_: None)


def test_a_member_that_is_interrupted_interrupts_the_ensemble(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    store.set("ensemble/next", "student")  # of an earlier start

    def make(folder: Path, options: dict[str, Any], observers: Sequence[Any]) -> Run:
        assert not store.check(["ensemble/next"])
        assert folder.name == "member-0"
        store.set("ensemble/ended/1", "interrupted")
        return Run(folder, "done", {})

    folder = tmp_path / "new"
    found = train_ensemble_of_ranks(*ensemble_of(2), lambda: (folder, None), (), make)
    assert found is not None
    assert (found.folder, found.outcome) == (folder, "interrupted")
    assert store.get("ensemble/next") == b""
    assert store.get("ensemble/folder") == str(folder).encode()


def _nowhere() -> tuple[Path, Run | None]:
    raise AssertionError("rank 0 alone chooses a folder")
