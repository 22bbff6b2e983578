"""How large buckets are: as asked, or as links want it."""

import pytest
import torch

from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.cost.all_reduce import ring_s, whole_s
from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.bucket_scheduling import bucket_bytes_for

LIKE = torch.empty(0)


def tuned(latency_s, bandwidth, workers=2, collective=None, like=LIKE):
    """Gives what every worker finds on links that are known."""
    time, found = VirtualTime(), []
    cluster = SimulatedCluster(time, ConstantNetwork(time, latency_s, bandwidth), workers)

    def play(rank):
        found.append(bucket_bytes_for("tuned", cluster.communicator(rank), collective or Library(), like))

    for rank in range(workers):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    return found


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(1e-3, 1e8), (1e-4, 1e9), (1e-3, 1e9)])
@pytest.mark.parametrize(
    ("collective", "few_s"), [(Library(), whole_s), (Ring(), ring_s)], ids=["library", "ring"]
)
def test_two_workers_wait_for_eight_latencies_of_a_number(latency_s, bandwidth, collective, few_s):
    one, other = tuned(latency_s, bandwidth, collective=collective)
    links = Machine(latency_s=latency_s, seconds_per_byte=1 / bandwidth, header_bytes=HEADER_BYTES)
    few, many = few_s(links, 2, Payload(1)), ring_s(links, 2, Payload(1 << 18))
    assert one == other == pytest.approx(8 * few / ((many - few) / (4 << 18)), rel=1e-3)


@pytest.mark.parametrize("given", ["0", "-5", "soon"])
def test_what_cannot_be_is_refused(given):
    with pytest.raises(RequestError, match="bucket_bytes"):
        build("strategy", f"synchronous(bucket_bytes={given})", *FAMILIES)


def test_a_dry_run_has_nothing_to_measure():
    strategy = build("strategy", "synchronous(bucket_bytes=tuned)", *FAMILIES)
    with pytest.raises(RequestError, match="give a number"):
        strategy.bucket_bytes_for(None, LIKE)
