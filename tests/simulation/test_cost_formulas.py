"""Simulated runs take the time that the formulas of `cost` say."""

from math import inf, sqrt
from statistics import fmean, stdev

import pytest
import torch

from conformance.jobs import CLASSES, SIDE, blobs, make_job, result_of, simulated
from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collectives.binomial_tree import BinomialTree
from polyrhythm.communication.collectives.two_level import TwoLevel
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.contended_network import ContendedNetwork
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.cost.all_reduce import direct_s, travels_whole, whole_s
from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.cost.order_statistics import (
    empirical_s,
    exponential_s,
    log_normal_s,
    normal_s,
    shifted_exponential_s,
)
from polyrhythm.cost.parameter_server import mean_staleness, staleness, synchronous_step_s
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import ConstantCluster, simulate_on
from polyrhythm.simulation.simulated_run import Wiring
from polyrhythm.simulation.step_time import STEP_TIMES, generator_for_rank
from polyrhythm.specs import build
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.training.flat_parameters import TAIL
from simulation.traces import wide
from unit.communication.collectives.groups import SPECS, collective
from unit.simulation.clusters import cluster

WORKERS, STEPS = 8, 400
TIMES_S = [0.5, 0.1, 0.2, 0.4, 0.1]


@pytest.fixture
def measured(tmp_path):
    """Gives a file of step times."""
    path = tmp_path / "times.txt"
    path.write_text("\n".join(map(str, TIMES_S)))
    return path


@pytest.mark.parametrize(
    ("spec", "expected_s"),
    [
        ("constant(seconds=0.2)", 0.2),
        ("exponential(mean=0.2)", exponential_s(0.2, WORKERS)),
        ("shifted_exponential(shift=0.3, mean=0.2)", shifted_exponential_s(0.3, 0.2, WORKERS)),
        ("normal(mean=0.2, deviation=0.05)", normal_s(0.2, 0.05, WORKERS)),
        ("log_normal(median=0.2, sigma=0.5)", log_normal_s(0.2, 0.5, WORKERS)),
        ("empirical(file='FILE')", empirical_s(TIMES_S, WORKERS)),
    ],
)
def test_a_step_in_step_takes_the_order_statistics_time(spec, expected_s, measured):
    """4 standard errors of the mean of 400 steps are allowed; the seed is fixed."""
    kind = build("step time", spec.replace("FILE", str(measured)), STEP_TIMES)
    time = VirtualTime()
    group = SimulatedCluster(time, ConstantNetwork(time, 0.0, 1e30), WORKERS)
    ends_s = []

    def work(rank):
        generator = generator_for_rank(5, rank)
        communicator = group.communicator(rank)
        sums = AllReduce(BinomialTree(), communicator)
        for _ in range(STEPS):
            time.sleep(kind.draw(generator))
            sums.run(torch.ones(1))
            if rank == 0:
                ends_s.append(time.now())

    for rank in range(WORKERS):
        time.spawn(f"worker {rank}", lambda rank=rank: work(rank))
    time.run()
    steps_s = [end - start for start, end in zip([0.0, *ends_s], ends_s, strict=False)]
    assert len(steps_s) == STEPS
    error = 4 * stdev(steps_s) / sqrt(STEPS)
    assert fmean(steps_s) == pytest.approx(expected_s, abs=max(error, 1e-9))
    assert error < 0.1 * expected_s


ALPHA, BETA = 1e-4, 1e-7
LINKS = Machine(latency_s=ALPHA, seconds_per_byte=BETA, header_bytes=HEADER_BYTES, shared_receiver=False)


WIDE = (SIDE * SIDE + 1) * 500 + (500 + 1) * CLASSES
TEXTS = 4e-4
"""What the difference of two runs may be wrong by, relatively: their reports are texts of unequal length."""


@pytest.fixture
def no_progress(monkeypatch):
    """Keeps workers from telling how far they are while they train."""
    monkeypatch.setattr("polyrhythm.roles.step_metrics.REPORT_EVERY_S", inf)


def seconds_per_step(run, steps=6):
    """Gives the difference that one more step makes."""
    short, long = (run(blobs(train=4 * 12 * count, test=3)) for count in (steps, 2 * steps))
    assert long["steps"] > short["steps"]
    return (long["seconds"] - short["seconds"]) / (long["steps"] - short["steps"])


@pytest.mark.usefixtures("no_progress")
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("two_level")])
def test_a_synchronous_step_is_computing_and_the_collectives_formula(spec, workers):
    def run(data):
        job = make_job(f"synchronous(collective={spec})", workers, dataset=data, epochs=1, model=wide)
        around = ConstantCluster(step_s=lambda worker: 0.01, latency_s=ALPHA, bandwidth_bytes_per_s=1 / BETA)
        return simulated(job, around).result

    exchange_s = collective(spec).seconds(LINKS, workers, Payload(WIDE + TAIL, 4))
    assert exchange_s > 0.005
    assert seconds_per_step(run) == pytest.approx(0.01 + exchange_s, rel=TEXTS)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("elements", [1, 720, 5040, 50400])
def test_own_sums_take_the_time_of_whole_vectors_or_of_slices(ranks, elements):
    time, payload = VirtualTime(), Payload(elements, 4)
    group = SimulatedCluster(time, ConstantNetwork(time, ALPHA, 1 / BETA), ranks)
    tensors = [torch.ones(elements) for _ in range(ranks)]
    for rank, tensor in enumerate(tensors):
        communicator = group.communicator(rank)
        time.spawn(f"{rank}", lambda at=communicator, tensor=tensor: at.all_reduce(tensor))
    time.run()
    assert all(torch.equal(tensor, torch.full_like(tensor, ranks)) for tensor in tensors)
    whole = travels_whole(payload.nbytes, ranks)
    assert whole == (payload.nbytes <= {2: 65536, 3: 12288, 4: 5461, 8: 1560}[ranks])
    expected_s = (whole_s if whole else direct_s)(LINKS, ranks, payload)
    assert time.now() == pytest.approx(expected_s, rel=1e-12)
    messages = (1 if whole else 2) * (ranks - 1)
    nbytes = (ranks if whole else 2) * (ranks - 1) * payload.nbytes
    assert sum(rank.bytes_sent for rank in group.ranks) == ranks * messages * HEADER_BYTES + nbytes


@pytest.mark.parametrize(("hosts", "ranks_a_host"), [(2, 2), (3, 2), (2, 4)])
def test_two_levels_share_the_links_of_their_hosts(hosts, ranks_a_host):
    """Where p ranks share a NIC, each has a p-th of it, and so it is inside a host."""
    nic, inside = ({"latency_s": alpha, "bandwidth_bytes_per_s": 1e9} for alpha in (1e-4, 1e-5))
    where = cluster({"count": hosts, "workers": ranks_a_host}, nic=nic, inside=inside)
    ranks, time = hosts * ranks_a_host, VirtualTime()
    wiring = Wiring(lay_out(where, ranks, 0, Shared()))
    group = SimulatedCluster(time, ContendedNetwork(time, wiring.bandwidths, wiring.route), ranks)
    kind, tensors = TwoLevel(group=ranks_a_host), [torch.ones(1200 * ranks) for _ in range(ranks)]
    for rank, tensor in enumerate(tensors):
        communicator = group.communicator(rank)
        time.spawn(f"{rank}", lambda at=communicator, tensor=tensor: kind.all_reduce(at, tensor))
    time.run()
    assert all(torch.equal(tensor, torch.full_like(tensor, ranks)) for tensor in tensors)
    near, far = (
        Machine(latency_s=alpha, seconds_per_byte=ranks_a_host * 1e-9, header_bytes=HEADER_BYTES)
        for alpha in (1e-5, 1e-4)
    )
    estimated_s = kind.seconds(near, ranks, Payload(1200 * ranks, 4), between=far)
    assert time.now() == pytest.approx(estimated_s, rel=1e-12)


@pytest.mark.usefixtures("no_progress")
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (3, 3), (6, 2), (2, 4)])
def test_a_step_of_the_synchronous_server_takes_the_formulas_time(workers, servers):
    nic = {"latency_s": ALPHA, "bandwidth_bytes_per_s": 1 / BETA}

    def run(data):
        spec = f"parameter_server(servers={servers}, consistency=synchronous, placement=dedicated)"
        job = make_job(spec, workers, dataset=data, epochs=1, model=wide)
        where = cluster({"count": workers + servers}, nic=nic, step_time="constant(seconds=0.01)")
        events = []
        simulate_on(
            lay_out(where, workers, servers, job.strategy.traits(workers).placement), job, events.append
        )
        return result_of(events)

    estimated_s = synchronous_step_s(LINKS, workers, servers, Payload(WIDE, 4), compute_s=0.01)
    longer_s = 2 * workers * 4 * BETA if WIDE % servers else 0.0  # some shards have a number more
    assert seconds_per_step(run) == pytest.approx(estimated_s, abs=longer_s + TEXTS * estimated_s)


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_gradients_of_equal_asynchronous_workers_are_as_stale_as_told(workers):
    steps = 10
    job = make_job("parameter_server", workers, dataset=blobs(train=workers * 4 * steps), epochs=1)
    found = simulated(job).result["staleness"]
    assert found["max"] == staleness(workers)
    assert found["mean"] == pytest.approx(mean_staleness(workers, steps))
