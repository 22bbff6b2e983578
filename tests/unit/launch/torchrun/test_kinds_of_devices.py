"""Ranks of torchrun whose hosts have GPUs or have none: each takes what `--device auto` finds there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrhythm.api.joining import _job, facts_of
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import PolyrhythmError, RequestError
from polyrhythm.launch.torchrun import started_rank as torchrun
from polyrhythm.launch.torchrun.report_rank import ReportedByLeader
from polyrhythm.strategies.role_assignment import RoleAssignment

PATIENCE_S = 20
REFUSED = (
    "device auto has found cpu on ranks 1,2, cuda on ranks 0: workers of synchronous update each its own copy of one "
    "model, which GPUs and CPUs round differently, so that the copies would part: take "
    "parameter_server(consistency=synchronous), local_sgd, or one kind of device, as by --device cpu"
)


def met(strategy: str, devices: list[str], roles: RoleAssignment) -> list[PolyrhythmError | None]:
    """Return what each rank comes upon, in threads that share a store."""
    store, chosen = host_store(), strategy_from(strategy)

    def rank(number: int) -> PolyrhythmError | None:
        job: Any = SimpleNamespace(
            strategy=chosen, workers=len(roles.workers), device=torch.device(devices[number])
        )
        own = local(number, len(devices), store.port)
        try:
            torchrun.check_devices(own, range(len(devices)), roles, job)
        except PolyrhythmError as error:
            return error
        return None

    with ThreadPoolExecutor(len(devices)) as pool:
        return [
            each.result(PATIENCE_S) for each in [pool.submit(rank, number) for number in range(len(devices))]
        ]


def test_one_gpu_among_three_hosts_is_refused_where_copies_must_agree() -> None:
    found = met("synchronous", ["cuda", "cpu", "cpu"], RoleAssignment((0, 1, 2)))
    assert [str(error) for error in found] == [REFUSED] * 3
    assert {type(error) for error in found} == {RequestError}


def test_only_rank_0_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    found = met("lazy_synchronous", ["cuda", "cpu"], RoleAssignment((0, 1)))
    assert {type(error) for error in found} == {ReportedByLeader}
    monkeypatch.setenv("RANK", "0")
    assert {type(error) for error in met("lazy_synchronous", ["cuda", "cpu"], RoleAssignment((0, 1)))} == {
        RequestError
    }


def test_a_guest_on_another_kind_of_device_is_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(strategy: str) -> Any:
        data = SimpleNamespace(train=[], image_shape=(1, 8, 8), classes=("a", "b"), listing_sha256="")
        return SimpleNamespace(
            strategy=strategy_from(strategy), workers=3, device=torch.device("cpu"), dataset=data
        )

    def joined(strategy: str, device: str) -> Any:
        made = job(strategy)
        monkeypatch.setattr("polyrhythm.api.joining.assemble", lambda *_: made)
        offer = {"config": {}, "folder": "run", "data": facts_of(made.dataset), "device": device}
        return _job(offer, {})

    with pytest.raises(
        RequestError, match="this worker would compute on cpu, and worker 0 on cuda: workers of"
    ):
        joined("synchronous", "cuda")
    assert joined("synchronous", "cpu").workers == 3
    assert joined("local_sgd", "cuda").workers == 3
