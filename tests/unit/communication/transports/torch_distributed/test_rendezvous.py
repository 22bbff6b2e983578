from __future__ import annotations

import os

import pytest
from torch.distributed import TCPStore

from polyrhythm.communication.transports.torch_distributed import rendezvous
from polyrhythm.errors import RequestError, RunError
from processes.ports import free_port

VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture
def port() -> int:
    """A free port of the loopback interface."""
    return free_port()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, port: int) -> dict[str, str]:
    """What torchrun would set for the only rank of a run."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    values = VARIABLES | {"MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def test_local_ranks_share_the_hosted_store() -> None:
    store = rendezvous.host_store()
    met = [rendezvous.local(rank, 2, store.port) for rank in range(2)]
    met[0].store.set("key", "value")
    assert met[1].store.get("key") == b"value"
    assert [(one.rank, one.size, one.address, one.keeper) for one in met] == [
        (rank, 2, "127.0.0.1", False) for rank in range(2)
    ]


def test_a_rank_without_a_gloo_group_has_no_thread_of_gloo() -> None:
    store = rendezvous.host_store()
    own = rendezvous.local(0, 1, store.port)
    before = set(os.listdir("/proc/self/task"))
    groups = rendezvous.Groups(own)
    assert set(os.listdir("/proc/self/task")) <= before
    group = groups.gloo("alone", 0, 1)
    assert set(os.listdir("/proc/self/task")) - before
    del group


def test_a_port_in_use_is_the_users_to_mend() -> None:
    store = rendezvous.host_store()
    with pytest.raises(RequestError, match=f"port {store.port} of 127.0.0.1 is in use: choose another, or 0"):
        rendezvous.host_store(store.port)


def test_the_environment_leads_to_the_store(environment: dict[str, str]) -> None:
    met = rendezvous.from_environment()
    assert (met.rank, met.size, met.address, met.keeper) == (0, 1, "127.0.0.1", True)
    met.store.set("key", "value")
    with pytest.raises(RequestError, match=f"port {environment['MASTER_PORT']} of 127.0.0.1 is in use"):
        rendezvous.from_environment()


def test_hosts_that_have_restarted_unequally_often_find_the_same_keys(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = TCPStore(
        "127.0.0.1", int(environment["MASTER_PORT"]), None, is_master=True, wait_for_workers=False
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = rendezvous.from_environment()
    assert not first.keeper
    first.store.set("key", "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = rendezvous.from_environment()
    assert again.store.get("key") == b"first"
    assert not agent.check(["key"])  # torchrun's own are others


@pytest.mark.parametrize(("name", "value"), [("RANK", None), ("WORLD_SIZE", "three"), ("MASTER_PORT", "")])
def test_a_bad_environment_is_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=name):
        rendezvous.from_environment()


def test_a_store_that_nobody_hosts_is_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_PATIENCE", rendezvous.timedelta(seconds=1))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        RunError, match=rf"rank 1 cannot reach the store at 127.0.0.1:{environment['MASTER_PORT']}: "
    ):
        rendezvous.from_environment()


def test_own_address_is_that_of_the_way_there() -> None:
    assert rendezvous.own_address("127.0.0.1", 80) == "127.0.0.1"
    assert rendezvous.own_address("localhost", 80) in ("127.0.0.1", "::1")
