"""Asynchronous strategies against hand-made replays: plain torch, fed with nothing but the order of arrivals."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import batch, blobs, cosine, make_job, simulated, uneven, vector_of
from polyrhythm.communication.message import Kind
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.parameter_server.serving.session import ServerSession


@pytest.fixture
def arrivals(monkeypatch):
    """Gives a list that fills with (server, rank, step) of all that arrives, in order; a pull's step is None."""
    seen, servers = [], []
    inner = ServerSession.on_message

    def on_message(self, source, message):
        if not any(self is server for server in servers):
            servers.append(self)
        if message.kind in (Kind.PUSH, Kind.PULL):
            seen.append((servers.index(self), source, message.step if message.kind is Kind.PUSH else None))
        return inner(self, source, message)

    monkeypatch.setattr(ServerSession, "on_message", on_message)
    return seen


def gradient_at(job, vector, step, members, workers):
    """Computes the mean gradient of some workers' batches at a vector, in plain torch; None if all are empty."""
    steps = job.steps_per_epoch
    found = []
    for worker in members:
        images, labels = batch(job, step // steps, step % steps, worker, workers)
        if not len(labels):
            continue
        model = job.make_model()
        nn.utils.vector_to_parameters(vector.clone(), model.parameters())
        functional.cross_entropy(model(images), labels).backward()
        found.append(
            (len(labels), torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
        )
    if len(found) > 1:
        assert len({count for count, _ in found}) == 1, (
            "equal batches only: their mean needs no rounded weights"
        )
        return sum(gradient for _, gradient in found) / len(found)
    return found[0][1] if found else None


def replay(job, arrivals, servers, replicas=1):
    """Applies every gradient in the order of its arrival; gives the servers' parameters and the staleness of each."""
    torch.manual_seed(job.learning.seed)
    values = vector_of(job.make_model())
    cuts = [len(values) * server // servers for server in range(servers + 1)]
    shards = [nn.Parameter(values[start:stop].clone()) for start, stop in pairwise(cuts)]
    optimizers = [job.learning.optimizer.create([shard]) for shard in shards]
    copies = {rank: values.clone() for rank in range(0, job.workers, replicas)}
    reads = {rank: [0] * servers for rank in copies}
    versions, gradients, staleness = [0] * servers, {}, []
    total_steps = job.steps_per_epoch * job.learning.epochs
    for server, rank, step in arrivals:
        if step is not None and (rank, step) not in gradients:
            members = range(rank, min(rank + replicas, job.workers))
            gradients[rank, step] = gradient_at(job, copies[rank], step, members, job.workers)
        gradient = gradients[rank, step] if step is not None else None
        if gradient is not None:
            shards[server].grad = gradient[cuts[server] : cuts[server + 1]]
            optimizers[server].param_groups[0]["lr"] = cosine(job, step, total_steps)
            optimizers[server].step()
            staleness.append(versions[server] - reads[rank][server])
            versions[server] += 1
        copies[rank][cuts[server] : cuts[server + 1]] = shards[server].detach()
        reads[rank][server] = versions[server]
    return torch.cat([shard.detach() for shard in shards]), staleness


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0)", "adam(lr=0.01)"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("workers", "images"), [(2, 53), (3, 53), (4, 50)])
def test_the_asynchronous_server_is_its_arrivals_replayed_by_hand(
    workers, images, servers, optimizer, arrivals
):
    job = make_job(
        f"parameter_server(servers={servers})", workers, dataset=blobs(train=images), optimizer=optimizer
    )
    trained = simulated(job, ConstantCluster(step_s=uneven))
    pushes = [(server, rank) for server, rank, step in arrivals if step is not None]
    assert len(pushes) == workers * servers * job.steps_per_epoch * 2
    assert [rank for server, rank in pushes if server == 0] != [*range(workers)] * job.steps_per_epoch * 2
    expected, staleness = replay(job, arrivals, servers)
    assert torch.equal(vector_of(trained.models[0]), expected)
    assert trained.result["staleness"]["max"] == max(staleness) > 0
    assert trained.result["staleness"]["mean"] == pytest.approx(sum(staleness) / len(staleness), rel=1e-12)


def test_a_worker_that_was_away_goes_on_with_what_the_others_did_meanwhile(arrivals):
    job = make_job("parameter_server(servers=2)", 3, epochs=3)
    slow = ConstantCluster(
        step_s=lambda worker: 0.002, bandwidth_bytes_per_s=1e5
    )  # an epoch's report takes 5 ms
    trained = simulated(job, slow)
    expected, staleness = replay(job, arrivals, servers=2)
    assert torch.equal(vector_of(trained.models[0]), expected)
    assert trained.result["staleness"]["mean"] == pytest.approx(sum(staleness) / len(staleness), rel=1e-12)
    without_catching_up = [arrival for arrival in arrivals if arrival[2] is not None]
    assert not torch.equal(replay(job, without_catching_up, servers=2)[0], expected)


@pytest.mark.parametrize("workers", [3, 4, 5])
def test_mixed_is_its_arrivals_replayed_by_hand(workers, arrivals):
    job = make_job("mixed(replicas=2, servers=2)", workers, dataset=blobs(train=16 * workers))
    trained = simulated(job, ConstantCluster(step_s=uneven))
    expected, staleness = replay(job, arrivals, servers=2, replicas=2)
    assert torch.equal(vector_of(trained.models[0]), expected)
    assert trained.result["staleness"]["mean"] == pytest.approx(sum(staleness) / len(staleness), rel=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_equal_workers_see_a_staleness_of_n_minus_1(workers):
    steps = 12
    job = make_job("parameter_server", workers, dataset=blobs(train=workers * 4 * steps), epochs=1)
    staleness = simulated(job).result["staleness"]
    # the first gradients meet 0, 1 … N-1, all later ones N-1
    assert staleness["max"] == workers - 1
    assert staleness["mean"] == pytest.approx((workers - 1) * (1 - 1 / (2 * steps)))


def test_equal_groups_see_a_staleness_of_groups_minus_1():
    job = make_job("mixed(replicas=2)", 6, dataset=blobs(train=6 * 4 * 16), epochs=1)
    staleness = simulated(job).result["staleness"]
    assert staleness["max"] == 2
    assert staleness["mean"] == pytest.approx(2 * (1 - 1 / 32))


def test_a_slow_worker_makes_stale_gradients_and_holds_nobody_up():
    def one_slow(worker):
        return 0.1 if worker == 2 else 0.01

    job = make_job("parameter_server", 3, dataset=blobs(train=48), epochs=4)
    asynchronous = simulated(job, ConstantCluster(step_s=one_slow))
    assert asynchronous.result["staleness"]["max"] >= 10
    ends = {
        worker: max(e.time_s for e in asynchronous.events if getattr(e, "worker", None) == worker and e.steps)
        for worker in (0, 1)
    }
    synchronous = simulated(
        make_job("synchronous", 3, dataset=blobs(train=48), epochs=4), ConstantCluster(step_s=one_slow)
    )
    assert synchronous.result["seconds"] == pytest.approx(16 * 0.1, rel=0.05)
    assert max(ends.values()) < 0.25 * synchronous.result["seconds"]
