import pytest
import torch

from polyrhythm.communication.transports.torch_distributed.communicator import one_gpu_a_rank
from polyrhythm.launch.devices import gpu_of


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_workers_of_a_host_take_one_gpu_each() -> None:
    found = [gpu_of(torch.device("cuda"), number) for number in range(5)]
    assert [device.index for device in found] == [0, 1, 0, 1, 0]
    assert gpu_of(torch.device("cpu"), 3) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_nccl_is_for_those_who_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [one_gpu_a_rank(members) for members in (1, 2, 3)] == [True, True, False]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two on each of four hosts
    assert one_gpu_a_rank(8)
