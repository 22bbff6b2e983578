"""Downpour against plain SGD, and against its rule in plain torch."""

import pytest
import torch

from conformance.jobs import (
    blobs,
    cosine,
    gradient,
    make_job,
    plain_loop,
    simulated,
    uneven,
    vector_of,
)
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.flat_parameters import shards
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)
PLAIN = "sgd(lr=0.2, momentum=0)"
STEPS = 11


def job_of(spec, workers=2, **learning):
    learning = {"optimizer": PLAIN, "dataset": blobs(train=4 * workers * STEPS), "epochs": 1} | learning
    return make_job(spec, workers, **{"dtype": torch.float64, **learning})


def by_hand(job, *, n_fetch, n_push, local_rate, warm_start_steps=0, seen=None):
    """Plays the rule, a worker's step at a time, in the order in which the steps end; gives what the server holds.

    Worker 0 begins alone; the others begin with what the server holds when it has so many of its gradients. `seen`
    gives what the receiver of a compressed vector sees of it.
    """
    seen = seen or (lambda vector: vector)
    torch.manual_seed(job.learning.seed)
    server = vector_of(job.make_model())
    own = [server.clone() for _ in range(job.workers)]
    total = [torch.zeros_like(server) for _ in range(job.workers)]
    error = [
        torch.zeros_like(server) for _ in range(job.workers)
    ]  # of its compressed sums, times their rates
    known = [server.clone() for _ in range(job.workers)]  # what the server knows that it has fetched
    fetched = [None] * job.workers
    pushes = [step for step in range(STEPS) if step % n_push == 0 or step + 1 == STEPS]
    alone = min(warm_start_steps, STEPS)
    admit = next(step for step in pushes if step + 1 >= alone) if alone else None
    begin = 0.0 if admit is None else (admit + 1) * uneven(0)
    ends = sorted(
        (begin * (worker > 0) + (step + 1) * uneven(worker), worker, step)
        for worker in range(job.workers)
        for step in range(STEPS)
    )
    for _, worker, step in ends:
        rate = cosine(job, step, STEPS)
        found = gradient(job, own[worker], worker, step)
        if fetched[worker] is not None:
            own[worker], fetched[worker] = fetched[worker], None
        own[worker] = own[worker] - local_rate * rate * found
        total[worker] = total[worker] + found
        if step in pushes:
            pushed = total[worker] + error[worker] / rate
            server = server - rate * seen(pushed)
            error[worker] = rate * (pushed - seen(pushed))
            total[worker] = torch.zeros_like(server)
        if (worker, step) == (0, admit):
            own[1:], known[1:] = ([server.clone() for _ in own[1:]] for _ in range(2))
        if (step + 1) % n_fetch == 0:
            known[worker] = known[worker] + seen(server - known[worker])
            fetched[worker] = known[worker].clone()
    return server


@pytest.mark.parametrize("servers", ["servers=1", "servers=3", "servers=3, replicas=2"])
@pytest.mark.parametrize(
    ("n_fetch", "n_push", "local_rate"), [(1, 1, 1.0), (2, 3, 1.0), (4, 1, 0.5), (3, 4, 0.0)]
)
def test_two_workers_by_hand(n_fetch, n_push, local_rate, servers):
    keys = {"n_fetch": n_fetch, "n_push": n_push, "local_rate": local_rate}
    job = job_of(f"downpour({', '.join(f'{key}={value}' for key, value in keys.items())}, {servers})")
    found = vector_of(simulated(job, UNEVEN).models[0])
    torch.testing.assert_close(found, by_hand(job, **keys), **REORDERED)


def sparse(job, servers, share):
    """The decoded form of a vector: of each weight matrix in a shard this share of its numbers, and all biases."""

    def seen(vector):
        found, start = vector.clone(), 0
        for parameter in job.make_model().parameters():
            stop = start + parameter.numel()
            for shard in shards(len(vector), servers) if parameter.dim() > 1 else []:
                part = found[max(start, shard.start) : min(stop, shard.stop)]
                if len(part):
                    part[part.abs().argsort(descending=True)[max(1, round(share * len(part))) :]] = 0
            start = stop
        return found

    return seen


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("n_fetch", "n_push", "warm_start_steps"), [(1, 1, 0), (2, 3, 0), (3, 1, 0), (1, 2, 4)]
)
def test_compressed_sums_and_differences_by_hand(n_fetch, n_push, warm_start_steps, servers):
    keys = {"n_fetch": n_fetch, "n_push": n_push, "warm_start_steps": warm_start_steps}
    options = ", ".join(f"{key}={value}" for key, value in keys.items())
    job = job_of(
        f"downpour({options}, servers={servers}, compress=top_k(density=0.3, dense_below=0))", workers=3
    )
    found = vector_of(simulated(job, UNEVEN).models[0])
    expected = by_hand(job, **keys, local_rate=1.0, seen=sparse(job, servers, 0.3))
    torch.testing.assert_close(found, expected, **REORDERED)
    assert (found - by_hand(job, **keys, local_rate=1.0)).abs().max() > 1e-3


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("warm_start_steps", [1, 4, 5, STEPS, 50])
@pytest.mark.parametrize(("n_fetch", "n_push", "local_rate"), [(1, 1, 1.0), (2, 3, 1.0)])
def test_a_warm_start_by_hand(n_fetch, n_push, local_rate, warm_start_steps, servers):
    """A sum of several counts when it is pushed; nobody waits for more steps than worker 0 takes."""
    keys = {"n_fetch": n_fetch, "n_push": n_push, "local_rate": local_rate}
    keys |= {"warm_start_steps": warm_start_steps}
    spec = f"downpour({', '.join(f'{key}={value}' for key, value in keys.items())}, servers={servers})"
    job = job_of(spec, workers=3)
    found = vector_of(simulated(job, UNEVEN).models[0])
    torch.testing.assert_close(found, by_hand(job, **keys), **REORDERED)
    cold = by_hand(job, **keys | {"warm_start_steps": 0})
    assert (found - cold).abs().max() > 1e-3


def test_one_worker_that_fetches_and_pushes_always_is_sgd_bit_for_bit():
    job = job_of("downpour", workers=1, dtype=torch.float32, epochs=3)
    found = simulated(job, ConstantCluster(latency_s=0.02)).models[0]  # however late what it fetches is
    assert torch.equal(vector_of(found), vector_of(plain_loop(job)))


def test_frozen_workers_that_push_k_gradients_take_one_step_with_their_sum():
    """No step of its own, and nothing fetched: all gradients are of the parameters that it began with."""
    job = job_of("downpour(n_fetch=99, n_push=10, local_rate=0)", workers=1, schedule="constant")
    torch.manual_seed(job.learning.seed)
    start = vector_of(job.make_model())
    found = [gradient(job, start, 0, step) for step in range(STEPS)]
    expected = start - 0.2 * found[0]  # the first push holds one gradient, the second ten
    expected = expected - 0.2 * sum(found[1:])
    torch.testing.assert_close(vector_of(simulated(job).models[0]), expected, **REORDERED)
