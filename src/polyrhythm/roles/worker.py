"""A worker of a real run: enters it, then takes its steps by `TrainingRun`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.communication.activity import Blocked
from polyrhythm.communication.collectives.auto import measure_links
from polyrhythm.errors import PeerLost
from polyrhythm.events import Notice
from polyrhythm.roles.balance import balancer_for
from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.deal import DealtBatches, deal_communicator
from polyrhythm.roles.job import Job
from polyrhythm.roles.leading.training_duties import training_leader
from polyrhythm.roles.member import Member
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.step_metrics import finish_work
from polyrhythm.roles.trainer import Trainer, TrainingRun
from polyrhythm.roles.world import World
from polyrhythm.strategies.compressing import compressor_of, payoff_of
from polyrhythm.training.checkpoint import restoring


def work(job: Job, world: World) -> None:
    """Train until all epochs are done or a rank is asked to stop.

    Args:
        job: training job.
        world: context of the rank.
    """
    if job.timings:
        world = world.timed(partial(finish_work, job.device))
    world, blocked = _watched(job, world)
    compute_time = _compute_time(job, blocked)
    workload = ModelWorkload(job, world)
    replica = workload.replica
    control: ControlPlane = (
        training_leader(job, world, replica)
        if world.leads
        else Member(
            world,
            job.strategy,
            replica,
            resumes=job.checkpointing.resume,
            every=job.checkpointing.every if job.checkpointing.saves else None,
        )
    )
    if job.draws:
        workload.dealt_batches = DealtBatches(
            deal_communicator(world), control.await_leader, world.clock.now, world.generation
        )
    entry, start = control.enter(), 0
    if (restored := entry.restored) is not None:
        restored.return_batches(replica)
        with restoring("the saved state of this worker"):
            workload.restore(restored)
        start = restored.account.step
    workload.continue_with(job.continued(entry.begun))
    trainer = Trainer(world, job.strategy, workload, control, job.fault_tolerance.digest_every)
    batch = workload.global_batch(min(workload.calendar.epoch_of(start), workload.calendar.epochs - 1))
    normalizes = any(isinstance(layer, _BatchNorm) for layer in replica.model.modules())
    balancer = balancer_for(
        job.balance,
        job.strategy,
        world,
        replica.workers,
        batch,
        compiled=job.learning.execution.compiled,
        drawn=job.draws,
        least=2 if normalizes else 1,
        compute_time=compute_time,
        exchanger=replica.part.exchanger,
    )
    in_step = job.traits.lockstep
    run = TrainingRun(
        trainer,
        workload,
        control,
        world,
        in_step=in_step,
        balancer=balancer,
        blocked=blocked if job.traits.waits_inside else None,
        staged=job.traits.pipelines > 0,
    )
    if not (world.rejoins or job.fault_tolerance.vacant):
        _report_whether_compression_pays(job, world, replica)
    run.run(trainer.open(start), entry.elapsed_s)


def _watched(job: Job, world: World) -> tuple[World, Blocked | None]:
    """Return a context that measures this worker's blocking time, if it blocks in passes or the time is used."""
    if job.traits.waits_inside or (job.balance.follows and world.pace is None):
        return world.watched()
    return world, None


def _compute_time(job: Job, blocked: Blocked | None) -> Callable[[], float] | None:
    """Return a function for this worker's time without blocking, where it is measured; else None."""
    if blocked is None or job.device.type == "cpu":  # the CPU has no queue
        return None if blocked is None else blocked.computed_s

    def compute_time() -> float:
        finish_work(job.device)
        return blocked.computed_s()

    return compute_time


def _report_whether_compression_pays(job: Job, world: World, replica: Replica) -> None:
    """Measure the link between the first and the last worker in a real run with compression, and emit the result."""
    strategy, workers, flat = job.strategy, replica.workers, replica.flat
    if world.pace is not None or compressor_of(strategy) is None or workers.size < 2:
        return
    if workers.rank not in (0, workers.size - 1):
        return
    try:
        link = measure_links(workers.subgroup("does it pay", (0, workers.size - 1)))
    except PeerLost:  # ranks that need the failed one will detect it
        return
    if world.leads:
        shapes = [tuple(view.parameter.shape) for view in flat.views]
        found = payoff_of(strategy, shapes, flat.vector.dtype, workers.size, 1 / link.seconds_per_byte)
        if found is not None:
            world.emit(Notice(time_s=0, text=found.text))
