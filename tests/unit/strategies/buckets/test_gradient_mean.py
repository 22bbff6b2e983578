"""The weighted mean of a group's gradients, over simulated links."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from polyrhythm.communication.collectives.auto import Auto
from polyrhythm.communication.collectives.rabenseifner import Rabenseifner
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters


@dataclass
class Member:
    """What one member of a group is given, and what it gets."""

    gradients: list
    weight: float = 1.0
    stop: bool = False
    announced: int = 0
    found: tuple = ()


def exchange(members, bucket_bytes=4 << 20, skew_s=0.0, collective=None):
    """Averages once; gives every member's gradients afterwards."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), len(members))
    flats = [FlatParameters(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), bucket_bytes) for _ in members]

    def play(rank, member):
        time.sleep(rank * skew_s)
        flat = flats[rank]
        flat.gradients.copy_(torch.tensor(member.gradients))
        mean = GradientMean(cluster.communicator(rank), flat, collective)
        mean.prepare()
        step = Step(0, member.weight, member.stop)
        mean.begin(step)
        for bucket in range(member.announced):
            mean.start(bucket)
            time.sleep(0.001)
        member.found = mean.finish(step)

    for rank, member in enumerate(members):
        time.spawn(f"member {rank}", lambda rank=rank, member=member: play(rank, member))
    time.run()
    return [flat.gradients.tolist() for flat in flats]


@pytest.mark.parametrize("announced", [0, 1, 4])
@pytest.mark.parametrize("skew_s", [0.0, 0.01])
@pytest.mark.parametrize("collective", [None, Ring(), Rabenseifner(), Auto()], ids=str)
def test_the_mean_is_weighted_with_samples(announced, skew_s, collective):
    members = [
        Member([8.0, 0.0, 4.0, 1.0], weight=1.0, announced=announced),
        Member([0.0, 8.0, 4.0, 1.0], weight=0.5, announced=announced),
        Member([9.0, 9.0, 9.0, 9.0], weight=0.0),  # an empty batch announces nothing
        Member([4.0, 4.0, 4.0, 1.0], weight=0.5, announced=announced),
    ]
    expected = [(8 + 2) / 2, (4 + 2) / 2, (4 + 2 + 2) / 2, 1.0]
    assert exchange(members, bucket_bytes=4, skew_s=skew_s, collective=collective) == [expected] * 4
    assert [member.found for member in members] == [(2.0, False)] * 4


def test_without_any_weight_there_is_no_mean_and_nothing_is_not_a_number():
    members = [Member([0.0] * 4, weight=0.0) for _ in range(2)]
    assert exchange(members) == [[0.0] * 4] * 2
    assert [member.found for member in members] == [(0.0, False)] * 2
