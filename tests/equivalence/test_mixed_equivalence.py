"""Mixed mode with other strategies inside its groups, against those strategies and against plain torch."""

import pytest
import torch

from conformance.jobs import batch, blobs, cosine, make_job, simulated, uneven, vector_of
from polyrhythm.simulation.run import ConstantCluster
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)


def vector(spec, workers, **learning):
    return vector_of(simulated(make_job(spec, workers, dtype=torch.float64, **learning), UNEVEN).models[0])


@pytest.mark.parametrize(
    "inside",
    [
        "local_sgd(steps=3)",
        "local_sgd(steps=4, optimizer_state=average)",
        "hierarchical_averaging(group=2, steps=2, steps_between=4)",
    ],
)
def test_one_group_is_its_inside_strategy(inside):
    found = vector(f"mixed(replicas=3, inside={inside})", 3, optimizer="adam")
    torch.testing.assert_close(found, vector(inside, 3, optimizer="adam"), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("steps", [1, 3])
def test_equal_groups_in_lock_step_are_local_sgd_of_all(steps):
    spec = f"mixed(replicas=2, consistency=synchronous, servers=2, inside=local_sgd(steps={steps}))"
    found = vector(spec, 4, dataset=blobs(train=48))
    expected = vector(f"local_sgd(steps={steps})", 4, dataset=blobs(train=48))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_the_mean_gradient_inside_is_what_mixed_is_by_default():
    plain = simulated(make_job("mixed(replicas=2)", 4), UNEVEN)
    said = simulated(make_job("mixed(replicas=2, inside=synchronous)", 4), UNEVEN)
    assert said.sha256 == plain.sha256


def local_rounds(job, group, steps, base, number):
    """Takes a round of plain SGD steps on each member of a group from `base`, and gives the mean of their models."""
    models = []
    per_epoch, total = job.steps_per_epoch, job.steps_per_epoch * job.learning.epochs
    for worker in group:
        model = job.make_model().double()
        torch.nn.utils.vector_to_parameters(base.clone(), model.parameters())
        for step in range(number * steps, min((number + 1) * steps, total)):
            images, labels = batch(job, step // per_epoch, step % per_epoch, worker, job.workers)
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(images.double()), labels).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= cosine(job, step, total) * parameter.grad
        models.append(vector_of(model))
    return torch.stack(models).mean(0)


def test_asynchronous_groups_of_local_sgd_by_hand():
    """Two groups of two, the second twice as slow: rounds arrive at 0, 0, 1, 0, 0, 1, … in an order told by time."""
    steps = 2
    job = make_job(
        f"mixed(replicas=2, inside=local_sgd(steps={steps}))",
        4,
        dtype=torch.float64,
        dataset=blobs(train=64),
        optimizer="sgd(lr=0.1, momentum=0)",
    )
    found = simulated(job, ConstantCluster(step_s=lambda worker: 0.01 if worker < 2 else 0.0221))
    torch.manual_seed(job.learning.seed)
    center = vector_of(job.make_model().double())
    rounds = job.steps_per_epoch * job.learning.epochs // steps
    arrivals = [(0.01 * steps * (n + 1), 0, n) for n in range(rounds)]
    arrivals += [(0.0221 * steps * (n + 1), 1, n) for n in range(rounds)]
    read = {0: center, 1: center}
    for _, group, number in sorted(arrivals):
        members = (2 * group, 2 * group + 1)
        moved = local_rounds(job, members, steps, read[group], number) - read[group]
        read[group] = center = center + moved
    torch.testing.assert_close(vector_of(found.models[0]), center, **REORDERED)


@pytest.mark.parametrize("replicas", [2, 4])
def test_one_node_of_bsc_is_synchronous_rmsprop_of_tensorflow_bit_for_bit(replicas):
    """2.3: a node's replicas with the paper's optimizer, which servers run, and all-reduce, where every worker does."""
    optimizer = "tf1_rmsprop(lr=0.1, decay=0.9, epsilon=1.0, weight_decay=0.0001)"
    node, reduced = (
        simulated(make_job(spec, replicas, optimizer=optimizer), UNEVEN)
        for spec in (f"mixed(replicas={replicas}, servers=3)", "synchronous")
    )
    assert node.sha256 == reduced.sha256
    other = simulated(make_job("synchronous", replicas, optimizer="rmsprop(lr=0.1)"), UNEVEN)
    assert node.sha256 != other.sha256
