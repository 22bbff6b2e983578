"""Activations that are computed again: the same bits in less memory."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import make_job, simulated, with_batch_norm
from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.partition.stage_memory import AllocatedBytes
from polyrhythm.roles.job import check_network_use
from polyrhythm.training.activation_checkpointing import CheckpointedBlocks
from polyrhythm.training.forward_pass import Execution, by_running_statistics


def step(model: nn.Module, images: torch.Tensor, *, again: bool) -> int:
    """Takes one step of a plain loop; returns the peak of the allocated bytes, without those of the gradients."""
    torch.manual_seed(7)
    blocks = CheckpointedBlocks(model, by_running_statistics)
    counted = AllocatedBytes()
    with counted:
        with blocks.on() if again else nullcontext():
            outputs = model(images)
        functional.cross_entropy(outputs, torch.arange(len(images)) % 10).backward()
    return counted.most - sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize(
    ("name", "side", "share"),
    [
        ("cifar_resnet(depth=20)", 32, 0.55),
        ("timm.mobilenetv3_small_050(drop_rate=0.2, drop_path_rate=0.2)", 64, 0.6),
    ],
)
def test_the_same_gradients_and_buffers_in_less_memory(name: str, side: int, share: float) -> None:
    torch.manual_seed(3)
    here = create_model(name, classes=10, image_shape=(3, side, side)).train()
    there = copy.deepcopy(here)
    images = torch.randn(4, 3, side, side)
    kept, recomputed = step(here, images, again=False), step(there, images, again=True)
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    for value, same in zip(here.buffers(), there.buffers(), strict=True):
        assert torch.equal(value, same)
    assert recomputed < share * kept


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = with_batch_norm()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(images)
        return result


def of_one_block() -> nn.Module:
    return nn.Sequential(Block())


@pytest.mark.parametrize(
    "spec", ["synchronous", "parameter_server(servers=2)", "d_psgd", "local_sgd(steps=2)"]
)
def test_runs_have_the_same_bits(spec: str) -> None:
    """Of 53 images the last batch of an epoch has one, which batch normalization treats apart."""
    made = [
        simulated(make_job(spec, 2, model=of_one_block, execution=Execution(checkpoints_activations=again)))
        for again in (False, True)
    ]
    assert made[0].sha256 == made[1].sha256


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ("pipeline", {}, "give it recompute=True instead"),
        ("hybrid", {}, "hybrid exchanges inside of forward passes"),
        ("lazy_synchronous", {}, "lazy_synchronous exchanges inside of forward passes"),
        ("synchronous(compress=sufficient_factors)", {}, "collects factors inside"),
        ("synchronous", {"optimizer": "kfac"}, "kfac collects statistics inside"),
    ],
)
def test_passes_that_do_more_than_compute_are_refused(spec: str, options: dict[str, str], why: str) -> None:
    job = make_job(spec, 2, execution=Execution(checkpoints_activations=True), **options)
    with pytest.raises(RequestError, match=why):
        check_network_use(job.strategy, 2, torch.float32, job.learning)


def test_a_chain_of_layers_is_refused() -> None:
    model = create_model("deep_image(width=8, hidden=8)", classes=10, image_shape=(1, 28, 28))
    with pytest.raises(RequestError, match="is not built of blocks"):
        CheckpointedBlocks(model, by_running_statistics)


def test_a_block_that_changes_its_input_is_refused() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(values.mul_(2))
            return result

    model = nn.Sequential(nn.Linear(4, 4), Doubling(), Doubling())
    blocks = CheckpointedBlocks(model, by_running_statistics)
    with blocks.on(), pytest.raises(RequestError, match="changes its input in place"):
        model(torch.ones(2, 4))
