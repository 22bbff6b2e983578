"""Finding the other ranks: who is what, and who may not come in."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import PREFIX, host_store
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.launch.script import SERVERS_KEY, meet
from polyrhythm.strategies.role_assignment import RoleAssignment


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """Hosts a store, and makes this process a rank of a run of 2 workers."""
    hosted = host_store()
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": hosted.port,
        "POLYRHYTHM_WORKERS": 2,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    become(monkeypatch, 0)
    return hosted


def become(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(max(2, rank + 1)))


def test_rank_0_asks_the_launcher_for_servers_which_come_after_the_workers(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = strategy_from("parameter_server(servers=3)")
    for rank in (0, 1, 4):
        become(monkeypatch, rank)
        rendezvous, roles = meet(strategy)
        assert (rendezvous.rank, rendezvous.size, rendezvous.keeper) == (rank, 5, False)
        assert roles == RoleAssignment((0, 1), (2, 3, 4))
    assert dist.PrefixStore(PREFIX, store).get(SERVERS_KEY) == b"3"


def test_all_must_mean_the_same_run(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    meet(strategy_from("synchronous"))
    become(monkeypatch, 1)
    with pytest.raises(
        RequestError, match=r"rank 1 joins with local_sgd\(steps=3\), rank 0 with synchronous"
    ):
        meet(strategy_from("local_sgd(steps=3)"))


def test_a_process_joins_once(store: dist.TCPStore) -> None:
    meet(strategy_from("synchronous"))
    with pytest.raises(RequestError, match="has joined before"):
        meet(strategy_from("synchronous"))


def test_torchruns_processes_must_be_enough(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYRHYTHM_WORKERS")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RequestError, match="cannot hold 1 servers and a worker: start at least 2"):
        meet(strategy_from("parameter_server"))


def test_one_process_on_its_own_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "POLYRHYTHM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    rendezvous, roles = meet(strategy_from("synchronous"))
    assert (rendezvous.rank, rendezvous.size, roles) == (0, 1, RoleAssignment((0,)))
