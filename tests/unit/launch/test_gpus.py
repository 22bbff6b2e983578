from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.collectives import (
    RankCollectives,
    Standing,
    each_has_a_gpu,
    seat_of,
)
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Groups, Rendezvous
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.model import devices_from
from polyrhythm.errors import RequestError
from polyrhythm.launch import rank as rank_of_a_run
from polyrhythm.launch.devices import check_kinds_of_devices, device_of_worker, gpu_of, threads_next_to_gpus
from polyrhythm.training.forward_pass import Precision


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_workers_of_a_host_take_one_gpu_each() -> None:
    found = [gpu_of(torch.device("cuda"), number) for number in range(5)]
    assert [device.index for device in found] == [0, 1, 0, 1, 0]
    assert gpu_of(torch.device("cpu"), 3) == torch.device("cpu")


@pytest.mark.parametrize(
    ("seats", "apart"),
    [
        (["a", "b"], True),
        (["a", "b", "c", "d"], True),
        (["a", "b", "a"], False),  # NCCL refuses to share one
        (["a", "b", "c", ""], False),  # a worker without a GPU has joined three with one each
        (["", "", ""], False),
    ],
)
def test_nccl_is_for_those_who_have_a_gpu_each(seats: list[str], apart: bool) -> None:
    assert each_has_a_gpu(seats) is apart


def test_three_gpus_and_a_cpu_choose_alike_though_the_cpu_never_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")
    )
    store, standing = dist.HashStore(), Standing(lambda rank: False, lambda lineage: None, lambda: 1.0)
    made = [Rendezvous(store, rank, 4, LOOPBACK) for rank in range(4)]
    ranks = [RankCollectives(own, Groups(own), standing, shared_memory=False) for own in made]
    for number, device in enumerate(["cuda:0", "cuda:1", "cuda:2", "cpu"]):
        ranks[number].take_seat(made[number].own, torch.device(device))
    peers = [own.own for own in made]
    found = [ranks[number].seats(peers, ()) for number in range(3)]
    assert found == [["GPU-0", "GPU-1", "GPU-2", ""]] * 3
    assert not each_has_a_gpu(found[0])
    assert each_has_a_gpu(ranks[0].seats(peers[:3], ()))


def test_a_gpu_is_told_apart_from_others_by_its_number_and_from_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{device.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert [seat_of(torch.device(name)) for name in ("cuda:1", "cpu")] == ["GPU-1", ""]


@pytest.mark.usefixtures("two_gpus")
def test_each_worker_may_have_another_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = devices_from("cpu, cuda, cuda, cuda, cpu", 5)
    found = [str(device_of_worker(devices, worker)) for worker in range(5)]
    assert found == ["cpu", "cuda:0", "cuda:1", "cuda:0", "cpu"]
    assert [threads_next_to_gpus(16, devices, worker) for worker in range(5)] == [6, 1, 1, 1, 6]
    assert [threads_next_to_gpus(2, devices, worker) for worker in range(5)] == [1] * 5
    assert devices_from("cpu", 3) == (torch.device("cpu"),) * 3


def test_each_has_the_precision_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    found = [Precision.choose("auto", torch.device(name)).dtype for name in ("cuda", "cpu")]
    assert found[0] is torch.bfloat16


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("cpu,cpu", "2 devices are not one for each of 3 workers: give 3, or one for all"),
        ("cpu,gpu,cpu", "unknown device 'gpu': there are auto, cpu, cuda"),
        ("cpu,,cpu", "unknown device ''"),
    ],
)
def test_devices_that_are_not_one_a_worker_are_refused(names: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        devices_from(names, 3)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("synchronous", "GPUs and CPUs round differently"),
        ("lazy_synchronous", "GPUs and CPUs round differently"),
        ("hogwild", "share a vector in their host's memory"),
        ("hybrid", "compute one network together"),
    ],
)
def test_kinds_are_refused_where_bits_must_agree(spec: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        check_kinds_of_devices(strategy_from(spec), 3)


@pytest.mark.parametrize(
    "spec",
    [
        "parameter_server",
        "parameter_server(consistency=synchronous)",
        "local_sgd",
        "ad_psgd",
        "easgd",
        "mixed",
    ],
)
def test_and_taken_where_workers_get_their_parameters_from_others(spec: str) -> None:
    try:
        check_kinds_of_devices(strategy_from(spec), 3)
    except RequestError as error:
        pytest.fail(f"{spec} is refused: {error}")


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_a_worker_draws_from_the_generator_of_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, current: list[str]
) -> None:
    """`torch.cuda.manual_seed`, by which a step's dropout is drawn, seeds the current GPU: by default the first."""
    chosen, at_work = list[str](), list[list[str]]()
    home = SimpleNamespace(clock=None, activity=None, refused={}, patience_s=1.0)
    home.computes_on = home.close = lambda *_: None
    job: Any = SimpleNamespace(
        device=torch.device(device),
        most_message_bytes=1,
        fault_tolerance=SimpleNamespace(silence_s=1.0, restarts=0),
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(rank_of_a_run, "connect", lambda rendezvous: (home, None))
    for name in ("RecordingCommunicator", "World"):
        monkeypatch.setattr(rank_of_a_run, name, lambda *_, **__: SimpleNamespace(is_worker=True))
    for name in ("Watchdog", "_setting", "use_threads", "keep_freed_memory"):
        monkeypatch.setattr(rank_of_a_run, name, lambda *_: nullcontext())
    monkeypatch.setattr(rank_of_a_run, "work", lambda *_: at_work.append(list(chosen)))
    around: Any = SimpleNamespace(emit=None, stop=None, ledger=None, guest=False)
    rank_of_a_run.run_rank(job, None, SimpleNamespace(generation=0), 1, around)  # type: ignore[arg-type]
    assert at_work == [current]
