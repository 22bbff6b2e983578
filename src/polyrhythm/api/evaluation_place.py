"""Place of the tests during a run: in place, or in a process of its own while steps continue.

`--evaluation async` is the same on all ranks and hosts, since each follows it from the configuration. `auto` is decided
here, by the process that starts all ranks, and is in place where ranks are started by others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polyrhythm.config.assemble import why_steps_wait
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.forked_call import can_fork, why_no_memory
from polyrhythm.launch.devices import available_cores, threads_for_worker
from polyrhythm.roles.job import EvaluationPlan, Job

if TYPE_CHECKING:
    from polyrhythm.simulation.layout import Layout

_NUMBER_BYTES = 4


def evaluated_here(job: Job, config: RunConfig) -> Job:
    """Return a job with the place of its tests, where this process starts the ranks.

    Raises:
        RequestError: tests are to be asynchronous, and this host has not the memory, or cannot fork.
    """
    if config.evaluation == "in_place":
        return job
    reason = why_steps_wait(job.traits, job.device) or _missing_part(job)
    if config.evaluation == "async":
        if reason:
            raise RequestError(f"--evaluation async: {reason}: give --evaluation in_place")
        return job
    if not reason and config.listen is not None:
        reason = "workers of other hosts may join"
    if not reason:
        here = config.workers - config.vacant
        threads = config.threads or threads_for_worker(available_cores(), here, job.strategy)
        free = available_cores() - here * threads - job.traits.servers
        reason = _why_no_core(free, threads)
    return _decided(job, reason)


def with_place_of_tests(job: Job, config: RunConfig) -> Job:
    """Return a job with the place of its tests, where others start the ranks."""
    return job if config.evaluation != "auto" else _decided(job, "torchrun has started the ranks")


def evaluated_on(layout: Layout, job: Job, config: RunConfig) -> Job:
    """Return a simulated job with the place of its tests."""
    if config.evaluation != "auto":
        return job
    host = layout.host_of[0]
    ranks = sum(each == host for each in layout.host_of)
    reason = why_steps_wait(job.traits, job.device)
    return _decided(job, reason or _why_no_core(layout.cluster.machines[host].cores - ranks, 1))


def _missing_part(job: Job) -> str:
    if not can_fork():
        return "this system cannot copy a process"
    return why_no_memory(_NUMBER_BYTES * job.numbers)


def _why_no_core(free: int, threads: int) -> str:
    if free >= threads:
        return ""
    return f"a test computes with {threads} thread{'s' * (threads > 1)}, and {max(0, free)} cores are free"


def _decided(job: Job, reason: str) -> Job:
    plan = EvaluationPlan(
        continues=not reason, remark=f"tests are in place, since {reason}" if reason else ""
    )
    return replace(job, evaluation=plan)
