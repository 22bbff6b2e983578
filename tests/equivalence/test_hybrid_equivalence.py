"""Hybrid parallelism is synchronous SGD, and so training with one large batch, whatever its scheme."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conformance.jobs import CLASSES, SIDE, blobs, make_job, plain_loop, simulated, uneven, vector_of
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

SCHEMES = ["a", "b", "c"]
UNEVEN = ConstantCluster(step_s=uneven)


def convolutional() -> nn.Module:
    """Makes a network with a convolution in front of two fully connected layers."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, CLASSES)
    )


def normed_last() -> nn.Module:
    """Makes a network that does not end in a fully connected layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES), nn.LayerNorm(CLASSES))


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_workers_together_train_as_one_with_their_batches(scheme: str, workers: int, optimizer: str) -> None:
    spec = f"hybrid(scheme={scheme})"
    job = make_job(spec, workers, model=convolutional, dtype=torch.float64, optimizer=optimizer)
    expected = vector_of(plain_loop(job, together=workers))
    model = simulated(job, UNEVEN).models[0]
    torch.testing.assert_close(vector_of(model), expected, **REORDERED)


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9)", "adam(lr=0.01)"])
@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        ("hybrid(trunk=channels)", 2),
        ("hybrid(trunk=channels, scheme=b)", 5),
        ("hybrid(trunk=height)", 3),
        ("hybrid(trunk=height, scheme=c)", 2),
    ],
)
def test_convolutions_that_are_cut_train_as_one_worker_with_all_batches(
    spec: str, workers: int, optimizer: str
) -> None:
    job = make_job(spec, workers, model=convolutional, dtype=torch.float64, optimizer=optimizer)
    expected = vector_of(plain_loop(job, together=workers))
    model = simulated(job, UNEVEN).models[0]
    torch.testing.assert_close(vector_of(model), expected, **REORDERED)


def normed() -> nn.Module:
    """Makes a network with batch normalization, a fully connected layer behind it."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, CLASSES)
    )


@pytest.mark.parametrize("trunk", ["channels", "height"])
def test_batches_are_normalized_as_one_and_all_workers_hold_its_statistics(trunk: str) -> None:
    job = make_job(f"hybrid(trunk={trunk})", 3, model=normed, dtype=torch.float64)
    expected = plain_loop(job, together=3)
    first, *others = simulated(job, UNEVEN).models
    for own, wanted in zip(first.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(own, wanted, **REORDERED)
    buffers = [[*model.buffers()] for model in others if not next(model.buffers()).is_meta]
    assert len(buffers) == 2, "attempts to build it of shapes alone are no workers"
    for own in buffers:
        torch.testing.assert_close(own, [*expected.buffers()], **REORDERED)


@pytest.mark.parametrize("trunk", ["channels", "height"])
def test_cut_convolutions_resume_with_the_bits_of_a_run_without_a_break(trunk: str, tmp_path: Path) -> None:
    job = make_job(f"hybrid(trunk={trunk})", 3, model=normed, optimizer="adam")
    whole = simulated(job, UNEVEN)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    first = simulated(kept, replace(UNEVEN, stop_at_s=0.06))
    assert 0 < first.checkpoint_steps[-1] < whole.result["steps"]
    second = simulated(replace(kept, checkpointing=replace(kept.checkpointing, resume=True)), UNEVEN)
    assert second.sha256 == whole.sha256


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_worker_is_the_plain_network_bit_for_bit(scheme: str) -> None:
    """In float32 some processors' last bits depend on where a matrix begins, which is elsewhere in a flat vector."""
    job = make_job(f"hybrid(scheme={scheme})", model=convolutional, dtype=torch.float64)
    assert torch.equal(vector_of(simulated(job).models[0]), vector_of(plain_loop(job)))


def test_all_schemes_send_the_same_numbers_in_more_or_fewer_messages() -> None:
    """Of 36 images, 3 workers take 4 each, so no message is empty: 64 bytes of header each."""
    sent = {}
    for scheme in SCHEMES:
        job = make_job(f"hybrid(scheme={scheme})", 3, model=convolutional, dataset=blobs(train=36))
        sent[scheme] = simulated(job).result["bytes_sent_per_step"]
    # To each of 2 others, in each of 1 or 3 rounds: examples, outputs, logits, the gradients of the three.
    assert sent["c"] - sent["a"] == pytest.approx((3 - 1) * 6 * 2 * 64)
    # Under b the round's owner sends both others examples, outputs, and the gradients of logits and outputs; each other
    # worker sends both others outputs and their gradients, and only the owner logits and the gradients of examples.
    owner, other, all_at_once = 2 * 4, 2 * 2 + 2, 2 * 6
    assert sent["b"] - sent["a"] == pytest.approx((owner + 2 * other - all_at_once) * 64)


class _Nothing(nn.Module):
    """A layer that does nothing; with a number that is no buffer, it is not built of shapes alone."""

    def __init__(self, number: object) -> None:
        super().__init__()
        self.number = number

    def forward(self, images: Tensor) -> Tensor:
        return images


@pytest.mark.parametrize("spec", ["hybrid", "hybrid(trunk=height)", "hybrid(scheme=b)"])
def test_workers_that_begin_with_shapes_alone_train_with_the_same_bits(spec: str) -> None:
    def made(number: object) -> nn.Module:
        layers = [*convolutional()]
        return nn.Sequential(*layers[:2], _Nothing(number), *layers[2:])

    hollow = simulated(make_job(spec, 3, model=lambda: made(None), optimizer="adam"), UNEVEN)
    full = simulated(make_job(spec, 3, model=lambda: made(torch.zeros(1)), optimizer="adam"), UNEVEN)
    assert [model[4].weight.is_meta for model in hollow.models] == [False, True, True]
    assert hollow.sha256 == full.sha256


def _bytes_held(model: nn.Module) -> int:
    """Return the bytes of the memory behind the parameters and gradients of a network."""
    tensors = [each for parameter in model.parameters() for each in (parameter.data, parameter.grad)]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (each.untyped_storage() for each in tensors if each is not None and not each.is_meta)
    }
    return sum(storages.values())


def test_only_owners_have_memory_for_their_neurons() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 6000), nn.ReLU(), nn.Linear(6000, CLASSES))

    models = simulated(make_job("hybrid", 3, model=wide)).models
    whole = sum(parameter.nbytes for parameter in wide().parameters())
    assert _bytes_held(models[0]) == pytest.approx(whole, rel=0.01)  # for the last test, without gradients
    assert [_bytes_held(model) for model in models[1:]] == [0, 0]  # shapes alone, next to the own rows


def test_what_it_cannot_train_is_refused_with_the_reason() -> None:
    refused = [
        (make_job("hybrid", 2, model=normed_last), "does not end in fully connected layers"),
        (make_job("hybrid", 2, precision="bfloat16"), "runs a network in parts, in full precision"),
        (make_job("hybrid", 2, weight_average=0.9), "has no whole model to average after each step"),
        (make_job("hybrid", 2, optimizer="lars"), "LARSOptimizer looks at whole layers"),
    ]
    for job, words in refused:
        with pytest.raises(RequestError, match=words) as caught:
            simulated(job)
        assert "\n" not in str(caught.value)


def test_it_resumes_with_the_bits_of_a_run_without_a_break(tmp_path: Path) -> None:
    job = make_job("hybrid(scheme=b)", 3, model=convolutional, optimizer="adam")
    whole = simulated(job, UNEVEN)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    first = simulated(kept, replace(UNEVEN, stop_at_s=0.06))
    assert 0 < first.checkpoint_steps[-1] < whole.result["steps"]
    second = simulated(replace(kept, checkpointing=replace(kept.checkpointing, resume=True)), UNEVEN)
    assert second.sha256 == whole.sha256
