"""A worker of a real run: enters it, then takes its steps by `TrainingRun`."""

from __future__ import annotations

from functools import partial

from polyrhythm.roles.job import Job
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.roles.remote_leader import RemoteLeader
from polyrhythm.roles.step_metrics import finish_work
from polyrhythm.roles.trainer import Trainer, TrainingRun
from polyrhythm.roles.welcome import share_untrained
from polyrhythm.roles.world import World


def work(job: Job, world: World) -> None:
    """Train until all epochs are done or a rank is asked to stop.

    Args:
        job: what to learn.
        world: where this rank is.
    """
    if job.timings:
        world = world.timed(partial(finish_work, job.device))
    workload = ModelWorkload(job, world)
    replica = workload.replica
    coordinator = (Leader if world.leads else RemoteLeader)(job, world, replica)
    start, elapsed_s = 0, 0.0
    if world.rejoins:
        elapsed_s = coordinator.rejoin()
    else:
        if job.faults.goes_on:
            share_untrained(world, replica)
        else:
            replica.share_untrained()
        if (restored := coordinator.restore()) is not None:
            restored.give_back(replica)
            workload.loss_scale = restored.loss_scale
            start = restored.account.step
    workload.continue_with(coordinator.job)
    trainer = Trainer(world, job.strategy, workload, coordinator)
    if trainer.apart is not None:
        coordinator.wait_among(trainer.apart)
    in_step = job.traits.lockstep
    run = TrainingRun(trainer, workload, coordinator, world, in_step=in_step)
    run.run(trainer.open(start), elapsed_s)
