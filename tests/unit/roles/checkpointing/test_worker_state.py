"""What a worker hands in, and gets back."""

from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyrhythm.communication.message import Kind
from polyrhythm.roles.checkpointing.archive import Snapshot
from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState, mean_buffers
from polyrhythm.strategies.worker_part import WorkerPart


class Part(WorkerPart):
    """A part with one tensor and one fact of state."""

    def __init__(self):
        super().__init__()
        self.momentum = torch.tensor([1.0, 2.0])
        self.clock = 7

    def state(self):
        return {"momentum": self.momentum}, {"clock": self.clock}

    def load_state(self, state):
        self.momentum, self.clock = state[0]["momentum"], state[1]["clock"]


class Same(Part):
    """A part that is the same on all workers."""

    replicated = True


def replica(part=None, seed=0):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].running_mean.copy_(torch.tensor([float(seed), 1.0]))
    model[0].num_batches_tracked.fill_(seed)
    flat = SimpleNamespace(vector=torch.zeros(6))
    return SimpleNamespace(part=part or Part(), buffers=dict(model.named_buffers()), model=model, flat=flat)


def account(worker=0):
    return Account(
        worker=worker,
        step=5,
        session_steps=5,
        session_images=20,
        epoch_images=8,
        epoch_loss=1.5,
        bytes_sent=640,
        staleness={"0": 4, "2": 1},
        stopped=True,
    )


def same(first, second):
    return (
        first.account == second.account
        and first.part_facts == second.part_facts
        and first.loss_scale == second.loss_scale
        and first.tensors().keys() == second.tensors().keys()
        and all(torch.equal(value, second.tensors()[name]) for name, value in first.tensors().items())
    )


def test_a_state_is_a_copy():
    own = replica(seed=3)
    state = WorkerState.of(own, account(), {})
    own.buffers["0.running_mean"].zero_()
    own.part.momentum.zero_()
    assert state.buffers["0.running_mean"].tolist() == [3.0, 1.0]
    assert state.part["momentum"].tolist() == [1.0, 2.0]


def test_a_state_goes_through_a_message():
    state = WorkerState.of(replica(seed=3), account(2), {"scale": 8.0})
    message = state.message()
    assert message.kind is Kind.RECORD
    assert same(WorkerState.from_message(message), state)


def test_a_state_is_given_back_whole():
    state = WorkerState.of(replica(seed=3), account(), {})
    other = replica(seed=9)
    other.part.momentum, other.part.clock = torch.zeros(2), 0
    state.return_batches(other)
    assert other.model[0].running_mean.tolist() == [3.0, 1.0]
    assert other.model[0].num_batches_tracked == 3
    assert (other.part.momentum.tolist(), other.part.clock) == ([1.0, 2.0], 7)
    assert other.part.staleness == {0: 4, 2: 1}


def test_what_is_the_same_everywhere_comes_from_worker_0_alone():
    states = {
        worker: WorkerState.of(replica(Same(), seed=worker), account(worker), {}) for worker in range(2)
    }
    assert states[0].part.keys() == {"momentum"}
    assert states[1].part == {}
    snapshot = Snapshot(epoch=1, step=5, seconds=2.0, parameters=torch.zeros(3), workers=states)
    given = snapshot.worker(1, replicated=True)
    assert (given.part["momentum"].tolist(), given.part_facts) == ([1.0, 2.0], {"clock": 7})
    assert given.buffers["0.running_mean"].tolist() == [1.0, 1.0]
    assert snapshot.worker(5, replicated=True).buffers["0.running_mean"].tolist() == [0.0, 1.0]


def test_a_snapshot_goes_through_tensors_and_facts():
    states = {worker: WorkerState.of(replica(seed=worker), account(worker), {}) for worker in range(12)}
    servers = [({"values": torch.full((2,), float(index))}, {"version": index}) for index in range(11)]
    average = {"value": torch.ones(3), "updates": torch.tensor(4)}
    snapshot = Snapshot(1, 5, 2.5, torch.arange(3.0), states, servers, average)
    again = Snapshot.of(snapshot.tensors(), snapshot.facts())
    assert (again.epoch, again.step, again.seconds) == (1, 5, 2.5)
    assert again.parameters.tolist() == [0.0, 1.0, 2.0]
    assert all(same(again.workers[worker], states[worker]) for worker in range(12))
    assert [(s["values"].tolist(), facts["version"]) for s, facts in again.servers] == [
        ([float(index)] * 2, index) for index in range(11)
    ]
    assert again.average["updates"] == 4


def test_buffers_are_averaged_and_counters_are_worker_0s():
    mean = mean_buffers([WorkerState.of(replica(seed=worker), account(worker), {}) for worker in (1, 2, 6)])
    assert mean["0.running_mean"].tolist() == [3.0, 1.0]
    assert mean["0.num_batches_tracked"] == 1


def test_the_mean_variance_is_that_of_all_pictures_though_means_differ():
    # Four workers draw batches of 12 numbers from the same data. Adding what their means differ by would be too much.
    data = torch.randn(400, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    kept, added = [], []
    for batches in data:
        states = []
        for batch in batches:
            norm = nn.BatchNorm1d(1, momentum=1.0, dtype=torch.float64)
            norm(batch[:, None])
            states.append(SimpleNamespace(buffers=dict(norm.named_buffers())))
        kept.append(mean_buffers(states)["running_var"].item())
        added.append(kept[-1] + batches.mean(1).var().item())
    assert fmean(kept) == pytest.approx(data.var().item(), rel=0.01)
    assert fmean(added) == pytest.approx((1 + 1 / 12) * data.var().item(), rel=0.02)
