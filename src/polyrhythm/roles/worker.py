"""A worker of a real run: enters it, then takes its steps by `TrainingRun`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.communication.forwarding import Blocked, TimedCommunicator
from polyrhythm.roles.balance import balancer_for
from polyrhythm.roles.control_plane import ControlPlane
from polyrhythm.roles.deal import Hand, deal_communicator
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
    world, compute_time = _measuring(job, world)
    workload = ModelWorkload(job, world)
    replica = workload.replica
    control: ControlPlane = (
        training_leader(job, world, replica)
        if world.leads
        else Member(world, job.strategy, replica, resumes=job.checkpointing.resume)
    )
    if job.draws:
        workload.hand = Hand(
            deal_communicator(world), control.await_leader, world.clock.now, world.generation
        )
    entry, start = control.enter(), 0
    if (restored := entry.restored) is not None:
        restored.give_back(replica)
        workload.loss_scale = restored.loss_scale
        start = restored.account.step
    workload.continue_with(job.going_on(entry.begun))
    trainer = Trainer(world, job.strategy, workload, control)
    batch = workload.global_batch(workload.calendar.epoch_of(start))
    normalises = any(isinstance(layer, _BatchNorm) for layer in replica.model.modules())
    balancer = balancer_for(
        job.balance,
        job.strategy,
        world,
        replica.workers,
        batch,
        compiled=job.learning.execution.compiled,
        least=2 if normalises else 1,
        compute_time=compute_time,
    )
    in_step = job.traits.lockstep
    run = TrainingRun(trainer, workload, control, world, in_step=in_step, balancer=balancer)
    run.run(trainer.open(start), entry.elapsed_s)


def _measuring(job: Job, world: World) -> tuple[World, Callable[[], float] | None]:
    """Return a world in which it is known how long this worker computes, and what says so where the clock does not."""
    if not (job.balance.follows and (job.traits.waits_between_layers or job.device.type == "cuda")):
        return world, None
    blocked, clock = Blocked(world.clock), world.clock

    def compute_time() -> float:
        finish_work(job.device)
        return clock.now() - blocked.seconds

    return replace(world, network=TimedCommunicator(world.network, blocked)), compute_time
