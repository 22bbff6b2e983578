"""The model that is tested and saved: all_peers's batch-norm statistics, and averaged weights if asked for."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from conformance.jobs import (
    make_job,
    plain_alone,
    plain_loop,
    simulated,
    strategies,
    strategy,
    uneven,
    vector_of,
    with_batch_norm,
)
from polyrhythm.simulation.run import ConstantCluster

WORKERS = 3
UNEVEN = ConstantCluster(step_s=uneven)


def figures_by_hand(job, weights):
    model = job.make_model()
    model.load_state_dict(weights)
    model.eval()
    test = job.dataset.test
    with torch.no_grad():
        logits = model(test.images(torch.arange(len(test))))
    loss = functional.cross_entropy(logits, test.labels).item()
    return loss, (logits.argmax(1) == test.labels).float().mean().item()


OWN_STATISTICS = [spec for spec in strategies() if not strategy(spec).traits(WORKERS).pipelines]
"""Each layer of a pipeline is on one worker, which tells its statistics to all."""


@pytest.mark.parametrize("spec", OWN_STATISTICS)
def test_tested_with_the_mean_of_the_workers_statistics(spec, tmp_path):
    job = make_job(spec, WORKERS, model=with_batch_norm, folder=tmp_path, checkpoints=0)
    trained = simulated(job, UNEVEN)
    saved = load_file(tmp_path / "model.safetensors")
    own = [dict(model.named_buffers()) for model in trained.models]
    assert not torch.equal(own[0]["1.running_mean"], own[1]["1.running_mean"])
    for name in ("1.running_mean", "1.running_var"):
        mean = sum(buffers[name].double() for buffers in own) / WORKERS
        torch.testing.assert_close(saved[name].double(), mean, rtol=1e-6, atol=1e-7)
    assert saved["1.num_batches_tracked"] == own[0]["1.num_batches_tracked"] == 10
    loss, top1 = figures_by_hand(job, saved)
    assert trained.result["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert trained.result["test_top1"] == pytest.approx(top1)


@pytest.mark.parametrize("spec", plain_alone())
def test_the_weight_average_of_one_worker_by_hand(spec, tmp_path):
    job = make_job(spec, folder=tmp_path, checkpoints=0, weight_average=0.7)
    torch.manual_seed(job.learning.seed)
    average = vector_of(job.make_model()).double()
    updates = 0

    def move(model):
        nonlocal average, updates
        decay = min(0.7, (1 + updates) / (10 + updates))
        average = decay * average + (1 - decay) * vector_of(model).double()
        updates += 1

    reference = plain_loop(job, each=move)
    trained = simulated(job)
    saved = load_file(tmp_path / "model.safetensors")
    names = [name for name, _ in reference.named_parameters()]
    found = torch.cat([saved[name].reshape(-1) for name in names]).double()
    torch.testing.assert_close(found, average, rtol=1e-5, atol=1e-6)
    assert torch.equal(vector_of(trained.models[0]), vector_of(reference))  # trained on without the average
    assert (found - vector_of(reference)).abs().max() > 1e-3
    loss, _ = figures_by_hand(job, saved)
    assert trained.result["test_loss"] == pytest.approx(loss, rel=1e-5)
