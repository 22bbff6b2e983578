from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.launch.devices import computing_speed, computing_with
from polyrhythm.launch.torchrun import started_rank
from polyrhythm.launch.torchrun.started_rank import device_of, placement_word, roles_of, workers_of
from polyrhythm.strategies.role_assignment import RoleAssignment


@pytest.mark.parametrize(
    ("strategy", "size", "workers"),
    [("synchronous", 3, 3), ("parameter_server(servers=2)", 3, 1), ("mixed(servers=2)", 8, 6)],
)
def test_whoever_is_no_server_works(
    strategy: str, size: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    assert workers_of(strategy_from(strategy)) == workers


def test_too_few_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match=r"needs 2 servers and a worker, torchrun started 2 .* at least 3"):
        workers_of(strategy_from("parameter_server(servers=2)"))


def test_ranks_take_the_gpus_of_their_host_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = []
    for local_rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        found.append(device_of(torch.device("cuda")))
    assert found == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    assert device_of(torch.device("cpu")) == torch.device("cpu")


def roles_with(
    speeds: list[float], monkeypatch: pytest.MonkeyPatch, spec: str = "easgd", device: str | None = "cpu"
) -> tuple[list[RoleAssignment], str]:
    """Returns what two ranks on each of some hosts of these speeds find who does what, and the word about it."""
    store, size = dist.HashStore(), 2 * len(speeds)
    for rank in range(size):
        store.set(f"host/{rank}", str(rank // 2))
        if device is not None:
            store.set(f"speed/{rank}", str(speeds[rank // 2]))
    found = []
    for rank in range(size):
        monkeypatch.setenv("GROUP_RANK", str(rank // 2))
        monkeypatch.setattr(started_rank, "computing_speed", lambda rank=rank: speeds[rank // 2])
        on = None if device is None else torch.device(device)
        rendezvous = Rendezvous(store, rank, size, LOOPBACK)
        found.append(roles_of(strategy_from(spec), rendezvous, device=on))
    return found, placement_word(store, found[0])


@pytest.mark.parametrize(
    ("speeds", "servers"),
    [
        ([3e10, 1e10], (1,)),
        ([1e10, 3e10], (3,)),
        ([1.2e10, 1e10], (3,)),  # too even to go by what was measured in a moment: the last host
        ([1e10, 3e10, 1e10], (3,)),
    ],
)
def test_where_work_goes_to_whoever_is_free_servers_are_near_the_fastest(
    speeds: list[float], servers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, word = roles_with(speeds, monkeypatch)
    assert {roles.servers for roles in found} == {servers}
    assert word.startswith(f"servers are ranks {servers[0]}: ") == (max(speeds) > 1.25 * min(speeds))


def test_servers_keep_to_the_order_of_hosts_where_all_wait_or_a_gpu_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, word = roles_with([3e10, 1e10], monkeypatch, "ssp", None)
    assert ({roles.servers for roles in waiting}, word) == ({(3,)}, "")
    for_gpus, word = roles_with([0.0, 1e10], monkeypatch, device="cuda")
    assert ({roles.servers for roles in for_gpus}, word) == ({(3,)}, "")


def test_the_speed_of_a_host_is_measured_without_a_change_of_threads() -> None:
    with computing_with(2):
        assert computing_speed() > 1e8
        assert torch.get_num_threads() == 2
