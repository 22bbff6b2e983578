"""A worker of a real run: enters it, then takes its steps by `TrainingRun`."""

from __future__ import annotations

from functools import partial

from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.job import Job
from polyrhythm.roles.leading.training_duties import training_leader
from polyrhythm.roles.member import Member
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.roles.step_metrics import finish_work
from polyrhythm.roles.trainer import Trainer, TrainingRun
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
    control: ControlPlane = (
        training_leader(job, world, replica)
        if world.leads
        else Member(world, job.strategy, replica, resumes=job.keeping.resume)
    )
    entry, start = control.enter(), 0
    if (restored := entry.restored) is not None:
        restored.give_back(replica)
        workload.loss_scale = restored.loss_scale
        start = restored.account.step
    workload.continue_with(job.going_on(entry.begun))
    trainer = Trainer(world, job.strategy, workload, control)
    run = TrainingRun(trainer, workload, control, world, in_step=job.traits.lockstep)
    run.run(trainer.open(start), entry.elapsed_s)
