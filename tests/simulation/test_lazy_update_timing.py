"""How long steps with lazy update take: by the timing model, and beside the eager ones.

Model, for a serial network: with e_b when the gradients of bucket b are ready and t_b its transfer,

    c_b = max(e_b, c_(b-1)) + t_b        when it is there, sent in the order of the backward pass
    f_b = max(f_(b+1), c_b)              when the next forward pass may go on with it, plus the layers' own time
"""

import pytest
import torch
from torch import nn

from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.cost.all_reduce import travels_whole
from polyrhythm.roles.world import FORWARD_SHARE, DrawnPace
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import TAIL, FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

STEP_S, LATENCY_S, WORKERS, STEPS = 0.3, 50e-6, 2, 8
LIKE_DEEP_IMAGE = ((200_000, 5_000, 5_000, 5_000), (0.05, 0.3, 0.3, 0.35))
EVEN = ((50_000, 50_000, 50_000, 50_000), (0.25, 0.25, 0.25, 0.25))
"""Numbers of each bucket, in the order of the backward pass, and shares of a pass's time."""


def steady_step_s(spec, shape, bandwidth):
    """Plays two workers; gives the seconds from one step to the next when all has settled down."""
    sizes, shares = shape
    time, began = VirtualTime(), []
    cluster = SimulatedCluster(time, ConstantNetwork(time, LATENCY_S, bandwidth), WORKERS)

    def play(rank):
        flat = FlatParameters(nn.ParameterList(torch.zeros(size) for size in reversed(sizes)), bucket_bytes=0)
        network = cluster.communicator(rank)
        plan = OptimizerPlan("SGD", (), 0.0)
        setting = WorkerSetting(network, network, RoleAssignment((0, 1)), flat, plan)
        part = build("strategy", spec, *FAMILIES).worker(setting)
        pace = DrawnPace(time, lambda: STEP_S)
        part.start(0)
        for number in range(STEPS):
            if rank == 0:
                began.append(time.now())
            part.begin(Step(number))
            pace.forward(shares, part.before_use)
            pace.backward(shares, part.bucket_ready)
            part.gradients_ready(Step(number), 0.0)
        part.settle()

    for rank in range(WORKERS):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    return (began[-1] - began[-3]) / 2  # whole vectors let one worker be a latency ahead, by turns


def transfer_s(numbers, bandwidth):
    """An all-reduce of two: the vector whole, or half of it there and half of the sums back."""
    nbytes = 4 * numbers
    if travels_whole(nbytes, WORKERS):
        return LATENCY_S + (HEADER_BYTES + nbytes) / bandwidth
    return 2 * (LATENCY_S + (HEADER_BYTES + nbytes / 2) / bandwidth)


def modeled_step_s(shape, bandwidth):
    """The timing model, stepped until it repeats itself."""
    sizes, shares = shape
    buckets = range(len(sizes))
    taken_s = [
        transfer_s(size + (TAIL if bucket == 0 else 0), bandwidth) for bucket, size in enumerate(sizes)
    ]
    there = [0.0] * len(sizes)
    now, began = 0.0, []
    for _ in range(STEPS):
        began.append(now)
        for bucket in reversed(buckets):
            now = max(now, there[bucket]) + STEP_S * FORWARD_SHARE * shares[bucket]
        last = 0.0
        for bucket in buckets:
            now += STEP_S * (1 - FORWARD_SHARE) * shares[bucket]
            last = there[bucket] = max(now, last) + taken_s[bucket]
        now = max(now, there[0])  # which brings the weights and the wishes
    return began[-1] - began[-2]


@pytest.mark.parametrize("bandwidth", [1e6, 3e6, 1e7, 1e8])
@pytest.mark.parametrize("shape", [LIKE_DEEP_IMAGE, EVEN], ids=["like_deep_image", "even"])
def test_in_order_the_timing_model_is_met(shape, bandwidth):
    found = steady_step_s("lazy_synchronous(piece_bytes=0)", shape, bandwidth)
    assert found == pytest.approx(modeled_step_s(shape, bandwidth), rel=1e-9)


@pytest.mark.parametrize("bandwidth", [1e6, 3e6, 1e7, 1e8])
@pytest.mark.parametrize("shape", [LIKE_DEEP_IMAGE, EVEN], ids=["like_deep_image", "even"])
@pytest.mark.parametrize("options", ["", "(piece_bytes=0)", "(piece_bytes=100000)"])
def test_a_step_is_never_later_than_the_eager_one(options, shape, bandwidth):
    times_s = 2 * 2 * 4 * len(shape[0]) / bandwidth  # with which piece 0 is longer
    pieces = sum(shape[0]) // 25_000
    latencies_s = 2 * pieces * (LATENCY_S + HEADER_BYTES / bandwidth) if "100000" in options else 0.0
    lazy = steady_step_s(f"lazy_synchronous{options}", shape, bandwidth)
    assert lazy <= steady_step_s("synchronous", shape, bandwidth) + times_s + latencies_s


@pytest.mark.parametrize(("bandwidth", "gain"), [(1e6, 1.09), (2e6, 1.15), (3e6, 1.2)])
def test_for_fully_connected_weight_urgency_beats_eager_overlap(bandwidth, gain):
    eager = steady_step_s("synchronous", LIKE_DEEP_IMAGE, bandwidth)
    in_order = steady_step_s("lazy_synchronous(piece_bytes=0)", LIKE_DEEP_IMAGE, bandwidth)
    urgent = steady_step_s("lazy_synchronous(piece_bytes=25000)", LIKE_DEEP_IMAGE, bandwidth)
    assert urgent < in_order
    assert eager / urgent > gain
    sizes, _ = LIKE_DEEP_IMAGE
    assert urgent < 1.06 * max(STEP_S, transfer_s(sum(sizes), bandwidth)), (
        "either computing or sending never stops"
    )
