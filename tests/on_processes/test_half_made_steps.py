"""A rank dies when some buckets of a step are added up, and the others have updated them."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import Tensor, nn

from conformance.rank_processes import RankProcesses, Seat
from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.allreduce.synchronous import BucketwiseUpdate, Synchronous, SynchronousWorker
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_optimizer import UndoLog, make_optimizers_quickly
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

RANKS, WHOLE_STEPS, LAST_WHOLE_BUCKET = 3, 2, 1


def make(network: Communicator) -> tuple[FlatParameters, SynchronousWorker]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(3)])
    flat = FlatParameters(model, bucket_bytes=500)
    plan = OptimizerPlan.of(torch.optim.Adam(model.parameters(), lr=0.01), flat)
    part = Synchronous().worker(
        WorkerSetting(network, network, RoleAssignment(tuple(range(RANKS))), flat, plan)
    )
    assert isinstance(part, SynchronousWorker)
    part.start(0)
    return flat, part


def digest(flat: FlatParameters, part: SynchronousWorker) -> str:
    told = hashlib.sha256(flat.vector.numpy().tobytes())
    for name, value in sorted(part.state()[0].items()):
        told.update(name.encode() + value.numpy().tobytes())
    return told.hexdigest()


def train(seat: Seat) -> None:
    torch.set_num_threads(1)
    make_optimizers_quickly()
    home, network = seat.connect()
    workers = network.subgroup("workers", range(RANKS))
    flat, part = make(workers)
    assert isinstance(part._optimizer, BucketwiseUpdate)
    taken_back = []
    restore = UndoLog.restore

    def taking_back(log: UndoLog) -> None:
        taken_back.append(log)
        restore(log)

    UndoLog.restore = taking_back  # type: ignore[method-assign]
    for number in range(WHOLE_STEPS):
        part.begin(Step(number))
        flat.gradients.fill_(0.1 * seat.rank + number)
        part.gradients_ready(Step(number), 0.01)
    before = digest(flat, part)
    update = part._optimizer._optimizer.step

    def updating(bucket: int, gradient: Tensor, rate: float) -> None:
        update(bucket, gradient, rate)
        if bucket == LAST_WHOLE_BUCKET:
            seat.tell("updated")

    part._optimizer._optimizer.step = updating  # type: ignore[method-assign]
    part.begin(Step(WHOLE_STEPS))
    flat.gradients.fill_(-1.0)
    if seat.rank == RANKS - 1:  # it takes part in two sums, sees that they have come, and dies
        for bucket in range(LAST_WHOLE_BUCKET + 1):
            part.bucket_ready(bucket)
        for handle in part.exchanger.sums._under_way:
            handle.wait()
        seat.tell(before)
        seat.wait_for_word()
        os._exit(0)
    try:
        part.gradients_ready(Step(WHOLE_STEPS), 0.01)
    except PeerLost:
        workers.revoke()
        part.exchanger.break_off()
        seat.tell((before, digest(flat, part), len(taken_back)))
    home.close()


def test_what_they_had_updated_is_as_it_was_before() -> None:
    with RankProcesses(train, RANKS, shared_memory=False) as ranks:
        last = ranks.hear(RANKS - 1)
        assert ranks.hear_all(range(RANKS - 1)) == ["updated"] * (RANKS - 1)
        ranks.say(RANKS - 1, "die")
        found = [ranks.hear(rank) for rank in range(RANKS - 1)]
        assert found == [(last, last, 2)] * (RANKS - 1)
        ranks.wait_for_end(range(RANKS))
