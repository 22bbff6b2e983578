"""Elastic averaging against its rule in plain torch, and its forms against each other."""

import pytest
import torch

from conformance.jobs import (
    blobs,
    cosine,
    gradient,
    make_job,
    saved_vector,
    sha256_of,
    simulated,
    uneven,
    vector_of,
)
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)
STEPS_PER_EPOCH = 6
PLAIN = "sgd(lr=0.2, momentum=0)"


def job_of(spec, workers=2, **learning):
    learning = {
        "optimizer": PLAIN,
        "dataset": blobs(train=4 * workers * STEPS_PER_EPOCH),
        "dtype": torch.float64,
    } | learning
    return make_job(spec, workers, **learning)


def start_of(job):
    torch.manual_seed(job.learning.seed)
    return vector_of(job.make_model())


def by_hand(job, *, alpha, tau, together, delta=0.0):
    """Plays the rule: exchanges at the begin of steps, in the order in which the steps begin; gives the center."""
    total = 2 * STEPS_PER_EPOCH
    center = start_of(job)
    own = [center.clone() for _ in range(job.workers)]
    velocity = [torch.zeros_like(center) for _ in range(job.workers)]
    begins = [
        (0.0 if together else step * uneven(worker), step, worker)
        for worker in range(job.workers)
        for step in range(total)
    ]
    begins.sort(key=lambda entry: (entry[1], entry[2]) if together else entry)
    old = center
    for _, step, worker in begins:
        if worker == 0 or not together:
            old = center.clone()
        pull = alpha * (own[worker] - old) if step % tau == 0 else torch.zeros_like(center)
        found = gradient(
            job,
            own[worker] + delta * velocity[worker],
            worker,
            step % STEPS_PER_EPOCH,
            step // STEPS_PER_EPOCH,
        )
        velocity[worker] = delta * velocity[worker] - cosine(job, step, total) * found
        own[worker] = own[worker] + velocity[worker] - pull
        center = center + pull
    old = center.clone()
    for worker in reversed(range(job.workers)):  # the leader leaves last
        center = center + alpha * (own[worker] - (old if together else center))
    return center


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_two_workers_by_hand(mode, tau):
    job = job_of(f"easgd(mode={mode}, tau={tau}, alpha=0.4, servers=2)")
    found = vector_of(simulated(job, UNEVEN).models[0])
    expected = by_hand(job, alpha=0.4, tau=tau, together=mode == "synchronous")
    torch.testing.assert_close(found, expected, **REORDERED)
    assert (found - start_of(job)).abs().max() > 0.1


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_two_workers_with_momentum_by_hand(mode):
    job = job_of(f"eamsgd(mode={mode}, tau=2, alpha=0.3, delta=0.7)")
    found = vector_of(simulated(job, UNEVEN).models[0])
    expected = by_hand(job, alpha=0.3, tau=2, together=mode == "synchronous", delta=0.7)
    torch.testing.assert_close(found, expected, **REORDERED)


@pytest.mark.parametrize("optimizer", [PLAIN, "adam", "sgd(momentum=0, weight_decay=0.01)"])
def test_without_momentum_eamsgd_is_easgd_bit_for_bit(optimizer):
    digests = [
        simulated(job_of(spec, 3, optimizer=optimizer, dtype=torch.float32), UNEVEN).sha256
        for spec in ("easgd(tau=2)", "eamsgd(tau=2, delta=0)")
    ]
    assert digests[0] == digests[1]


def test_alpha_of_zero_leaves_the_workers_alone():
    """The center stays where it was, and worker 1 ends as plain SGD on its own batches."""
    job = job_of("easgd(alpha=0, tau=1)")
    trained = simulated(job, UNEVEN)
    assert trained.sha256 == sha256_of(start_of(job))
    own = start_of(job)
    for step in range(2 * STEPS_PER_EPOCH):
        own = own - cosine(job, step, 2 * STEPS_PER_EPOCH) * gradient(
            job, own, 1, step % STEPS_PER_EPOCH, step // STEPS_PER_EPOCH
        )
    torch.testing.assert_close(vector_of(trained.models[1]), own, **REORDERED)


def test_the_center_is_what_is_tested_and_saved(tmp_path):
    job = job_of("easgd(tau=2)", dtype=torch.float32, folder=tmp_path)
    trained = simulated(job, UNEVEN)
    saved = saved_vector(tmp_path)
    assert sha256_of(saved) == trained.sha256
    assert not torch.equal(saved, vector_of(trained.models[1]))
    # with alpha = 0 the center stays untrained, however well the workers learn: every test must show that
    still = simulated(job_of("easgd(alpha=0)", dtype=torch.float32), UNEVEN)
    losses = [event.test_loss for event in still.events if type(event).__name__ == "Evaluated"]
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_another_momentum_than_delta_is_refused():
    with pytest.raises(
        RequestError, match=r"momentum delta=0\.5, and the optimizer one of 0\.9: give it momentum=0"
    ):
        simulated(job_of("eamsgd(delta=0.5)", optimizer="sgd"))
    simulated(job_of("eamsgd(delta=0.9)", optimizer="sgd"))  # the optimizer's stands for it
