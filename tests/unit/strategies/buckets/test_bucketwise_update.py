"""Updates that follow the sums: when they are made, to which bits, and what is left of one that breaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.allreduce.synchronous import BucketwiseUpdate, Synchronous, SynchronousWorker
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.state import State
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_optimizer import UndoLog
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from polyrhythm.training.optimizers.lars import LARSOptimizer

Make = Callable[[Any], torch.optim.Optimizer]
WORKERS, RATE = 3, 0.1


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)


class Scene:
    """Three workers of a model of four parameters, a bucket each."""

    def __init__(self, make: Make = sgd, **options: Any) -> None:
        self.time = VirtualTime()
        self.cluster = SimulatedCluster(self.time, ConstantNetwork(self.time, 1e-3, 1e5), WORKERS)
        self.make, self.spec = make, Synchronous(**options)
        self.flats: dict[int, FlatParameters] = {}
        self.parts: dict[int, SynchronousWorker] = {}
        self.networks: dict[int, Communicator] = {}

    def enter(
        self, rank: int, resumed: tuple[Tensor, State] | None = None
    ) -> tuple[FlatParameters, SynchronousWorker]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        flat = FlatParameters(model, bucket_bytes=0)
        network = self.cluster.communicator(rank).subgroup("workers", range(WORKERS))
        plan = OptimizerPlan.of(self.make(model.parameters()), flat)
        part = self.spec.worker(
            WorkerSetting(network, network, RoleAssignment(tuple(range(WORKERS))), flat, plan)
        )
        assert isinstance(part, SynchronousWorker)
        if resumed is not None:
            flat.vector.copy_(resumed[0])
            part.load_state(resumed[1])
        part.start(0)
        self.flats[rank], self.parts[rank], self.networks[rank] = flat, part, network
        return flat, part

    def play(self, body: Callable[[int], None]) -> None:
        for rank in range(WORKERS):
            owner = self.cluster.ranks[rank]
            self.time.spawn(f"worker {rank}", partial(body, rank), owner=owner)
        self.time.run()


def gradient(rank: int, number: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + number))


def step(part: SynchronousWorker, flat: FlatParameters, rank: int, number: int, weight: float = 1.0) -> None:
    asked = Step(number, weight)
    part.begin(asked)
    flat.gradients.copy_(gradient(rank, number, flat.size))
    part.gradients_ready(asked, RATE)
    flat.zero_gradients()


def trained(make: Make, steps: int = 4) -> tuple[Scene, list[Tensor]]:
    scene = Scene(make)

    def body(rank: int) -> None:
        flat, part = scene.enter(rank)
        for number in range(steps):  # of the third nobody has any image
            step(part, flat, rank, number, 0.0 if number == 2 else 0.5 + rank)

    scene.play(body)
    return scene, [scene.flats[rank].vector for rank in range(WORKERS)]


@pytest.mark.parametrize("make", [sgd, adam, torch.optim.NAdam, torch.optim.Rprop])
def test_the_bits_and_the_state_are_those_of_an_update_of_the_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, vectors = trained(make)
    assert isinstance(scene.parts[0]._optimizer, BucketwiseUpdate)
    monkeypatch.setattr(BucketwiseUpdate, "fits", lambda plan, mean: False)
    plainly, whole = trained(make)
    for vector in vectors:
        assert torch.equal(vector, whole[0])
    (tensors, facts), (expected, expected_facts) = scene.parts[1].state(), plainly.parts[1].state()
    assert facts == expected_facts
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert scene.parts[1].staleness == plainly.parts[1].staleness == {0: 3}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("done", [0, 2])
def test_of_a_step_that_breaks_nothing_is_left(
    make: Make, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back: list[UndoLog] = []
    restore = UndoLog.restore

    def taking_back(log: UndoLog) -> None:
        taken_back.append(log)
        restore(log)

    monkeypatch.setattr(UndoLog, "restore", taking_back)
    broke = [_broken(make, done, after_s) for after_s in (0.0, 0.002, 0.004, 0.006, 0.008, 0.01)]
    assert sum(broke) > 4
    assert len({id(log) for log in taken_back}) > 4  # of several workers, and several buckets


def _broken(make: Make, done: int, after_s: float) -> int:
    """Kills a worker some time after a step began; gives how many of the others saw the step break."""
    scene, broken = Scene(make), []

    def body(rank: int) -> None:
        flat, part = scene.enter(rank)
        for number in range(done):
            step(part, flat, rank, number)
        if rank == 0:
            scene.time.at(scene.time.now() + after_s, lambda: scene.cluster.kill(2))
        before, (tensors, facts) = flat.vector.clone(), part.state()
        kept = {name: value.clone() for name, value in tensors.items()}
        try:
            step(part, flat, rank, done)
        except PeerLost:
            broken.append(rank)
            scene.networks[rank].revoke()
            part.exchanger.break_off()
            now, now_facts = part.state()
            assert torch.equal(flat.vector, before)
            assert now_facts == facts
            assert now.keys() == kept.keys()
            assert all(torch.equal(now[name], kept[name]) for name in kept)

    scene.play(body)
    return len(broken)


def lars(parameters: Any) -> torch.optim.Optimizer:
    return LARSOptimizer(parameters, lr=RATE)


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(make: Make) -> None:
    straight, before, after = Scene(make), Scene(make), Scene(make)
    kept: list[tuple[Tensor, State]] = []

    def play(scene: Scene, numbers: range, rank: int) -> None:
        flat, part = scene.enter(rank, kept[0] if kept else None)
        for number in numbers:
            step(part, flat, rank, number)

    straight.play(partial(play, straight, range(4)))
    before.play(partial(play, before, range(2)))
    kept.append((before.flats[0].vector, before.parts[0].state()))
    after.play(partial(play, after, range(2, 4)))
    assert isinstance(after.parts[0]._optimizer, BucketwiseUpdate)
    assert torch.equal(after.flats[0].vector, straight.flats[0].vector)
