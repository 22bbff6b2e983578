from __future__ import annotations

import pytest
import torch

from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.launch.torchrun.started_rank import device_of, workers_of


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
