"""Measurement of hosts, links and steps, for the verb `profile`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch

from polyrhythm.api.loop.loop_profile import PROFILE_VARIABLE
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import from_environment
from polyrhythm.config.assemble import assemble
from polyrhythm.config.model import name_of, shapes_of
from polyrhythm.config.recipe import configure
from polyrhythm.config.run_config import RunConfig, RunOptions
from polyrhythm.errors import RequestError
from polyrhythm.launch.devices import computing_with
from polyrhythm.launch.process import ask_names_briefly
from polyrhythm.launch.script import run_script
from polyrhythm.launch.torchrun.gathering import gather
from polyrhythm.launch.torchrun.report_rank import leader_speaks, leads, started_by_torchrun
from polyrhythm.planning.analysis import step_multiply_adds
from polyrhythm.planning.limits import dependent, embedded, measured_limits
from polyrhythm.planning.link import MeasuredLink, answer_link, measure_inside, measure_link
from polyrhythm.planning.profile import Host, Profile, measure_host, overhead_share
from polyrhythm.planning.step import (
    WARM_UP,
    Layer,
    StepProfile,
    measure_server_update,
    profile_step,
    watched_steps,
)
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.cluster import MeasuredLayer, StepWork, cluster_text
from polyrhythm.specs import Spec
from polyrhythm.training.forward_pass import Precision
from polyrhythm.user_files import check_new_file

_log = logging.getLogger(__name__)
PROFILE_FILE = "profile.yaml"
_LEAST_STEPS = 5
_LEADER = 0


def profile(
    *,
    steps: int = 30,
    out: str | Path = PROFILE_FILE,
    start_method: str = "spawn",
    **options: Unpack[RunOptions],
) -> dict[str, Any] | None:
    """Measure this host, its links and the step of a model, and write them as a cluster file.

    Started by torchrun on several hosts, it also measures the links between them and the speed of each; one
    process per host is enough.

    Args:
        steps: number of steps to measure, at least 5.
        out: the file, which must not exist yet.
        start_method: start method of the two processes between which the link inside the host is measured.
        **options: `data`, `model`, `batch_size`, and any other field of `RunConfig` that affects the time of
            a step. `threads` is 1 by default, and unreadable images are skipped.

    Returns:
        The measurements, JSON-able, with `file`; None in a rank of torchrun that does not lead.

    Raises:
        RequestError: the request is invalid; nothing has been written.
        RunError: a measurement failed.
    """
    out = Path(out)
    with leader_speaks():
        _check(steps, out)
        config = configure(
            {"threads": 1, "skip_unreadable": True}, options, {"strategy": "synchronous", "workers": 1}
        )
        job = assemble(config, CheckpointConfig(checkpoints=0))
    threads = config.threads or 1
    inside = None if started_by_torchrun() and not leads() else measure_inside(start_method)
    with computing_with(threads):
        if started_by_torchrun():
            found = _with_others(job, steps, threads, inside)
        else:
            assert inside is not None
            found = Profile(
                (measure_host(),), (1.0,), threads, inside, None, profile_step(job, steps), _name(job)
            )
        if found is not None:
            found = dataclasses.replace(found, step_of=step_of(config, job, steps, found.step))
    if found is None:
        return None
    with computing_with(1):
        update = measure_server_update(job, found.hosts[0].memory_bandwidth_bytes_per_s)
    found = dataclasses.replace(found, server_update=update)
    out.write_text(cluster_text(found.cluster(out.stem)), encoding="utf-8")
    return {"file": str(out), **found.to_json()}


def profile_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = 30,
    threads: int = 1,
    module: bool = False,
    out: str | Path = PROFILE_FILE,
    start_method: str = "spawn",
) -> dict[str, Any]:
    """Measure this host and the steps of a script that calls `polyrhythm.join`, and write them as a cluster file.

    The script runs as one synchronous worker, and is ended after enough steps. `step_of` of the file has the sizes of
    its network's layers: `simulate` and `plan` take them as `--model "sizes(file='profile.yaml')"`.

    Args:
        script: a Python file, or the name of a module.
        arguments: arguments for the script.
        steps: number of steps to measure, at least 5.
        threads: compute threads of the worker.
        module: whether `script` is the name of a module.
        out: the file, which must not exist yet.
        start_method: start method of the two processes between which the link inside the host is measured.

    Returns:
        The measurements, JSON-able, with `file`.

    Raises:
        RequestError: the request is invalid, or the script has taken too few steps.
        RunError: the script failed.
    """
    out = Path(out)
    _check(steps, out)
    with tempfile.TemporaryDirectory(prefix="polyrhythm-profile-") as folder:
        file = Path(folder) / "steps.json"
        os.environ[PROFILE_VARIABLE] = f"{steps}:{file}"
        try:
            run_script(script, arguments, workers=1, threads=threads, restarts=0, module=module)
        finally:
            del os.environ[PROFILE_VARIABLE]
        if not file.is_file():
            needed = WARM_UP + steps + sum(watched_steps(steps))
            raise RequestError(
                f"{script} ended before it had taken {needed} steps of an optimizer of group.distribute: give it more "
                "epochs, or --steps fewer"
            )
        measured = json.loads(file.read_text(encoding="utf-8"))
    limits = tuple(measured["limits"])
    for reason in limits:
        _log.warning("%s: %s", measured["model"], reason)
    layers = tuple(Layer(**layer) for layer in measured["layers"])
    whole = tuple(sum(each[1:]) for each in measured["steps"])
    data, forward, backward, update = (
        statistics.median(times) for times in zip(*measured["steps"], strict=True)
    )
    step = StepProfile(whole, data, forward, backward, update, layers)
    sized = measured_layers(layers)
    batch = measured["batch_size"] or None
    text = str(Spec("sizes", {"file": str(out)}))
    work = StepWork(
        model=text,
        batch_size=batch,
        multiply_adds=3.0 * sum(layer.parameters for layer in sized) * (batch or 1),
        layers=sized,
        limits=limits,
    )
    name = f"{measured['model']} of {script}, batch size {batch}"
    inside = measure_inside(start_method)
    found = Profile((measure_host(),), (1.0,), threads, inside, None, step, name, work)
    out.write_text(cluster_text(found.cluster(out.stem)), encoding="utf-8")
    return {"file": str(out), **found.to_json()}


def measured_layers(layers: Sequence[Layer]) -> tuple[MeasuredLayer, ...]:
    """Return the layers with parameters; the time of one without counts with the one before it, or the first."""
    names: list[Layer] = []
    seconds: list[float] = []
    before = 0.0
    for layer in layers:
        time_s = layer.forward_s + layer.backward_s
        if layer.parameters:
            names.append(layer)
            seconds.append(time_s + before)
            before = 0.0
        elif seconds:
            seconds[-1] += time_s
        else:
            before += time_s
    return tuple(
        MeasuredLayer(name=layer.name, parameters=layer.parameters, seconds=time_s)
        for layer, time_s in zip(names, seconds, strict=True)
    )


_SMALLER = 4
"""By how much the second batch is smaller than the first."""


def step_of(config: RunConfig, job: Job, steps: int, step: StepProfile) -> StepWork:
    """Describe the measured step and a smaller one; without multiply-adds where other steps do not follow from it."""
    dataset = job.dataset
    shape = dataset.image_shape
    shapes = shapes_of(config.model, len(dataset.classes), shape)
    limits = (*dependent(shapes, shape), *measured_limits(1, step.varied))
    for reason in (*limits, *embedded(shapes)):
        _log.warning("%s: %s", job.model_name, reason)
    dtype = Precision.choose(config.precision, torch.device(job.device)).dtype
    alone = StepWork(
        model=name_of(config.model),
        batch_size=config.batch_size,
        precision=str(dtype).removeprefix("torch."),
        limits=limits,
    )
    if limits:
        return alone
    try:
        multiply_adds = step_multiply_adds(shapes, shape, config.batch_size)
    except RequestError:
        return alone
    smaller = max(2, config.batch_size // _SMALLER)
    share = 0.0
    if smaller < config.batch_size:
        less = assemble(config.model_copy(update={"batch_size": smaller}), CheckpointConfig(checkpoints=0))
        other = profile_step(less, steps)
        share = overhead_share(config.batch_size, step.median_s, smaller, other.median_s)
    return alone.model_copy(update={"multiply_adds": multiply_adds, "overhead_share": share})


def _check(steps: int, out: Path) -> None:
    if steps < _LEAST_STEPS:
        raise RequestError(f"a median of {steps} steps is too noisy: measure at least {_LEAST_STEPS}")
    check_new_file(out)


def _name(job: Job) -> str:
    return f"{job.model_name} on {job.dataset.name}, batch size {job.learning.batch_size}"


def _with_others(job: Job, steps: int, threads: int, inside: MeasuredLink | None) -> Profile | None:
    """Measure together with torchrun's other ranks; those that are not the first of their host only wait."""
    ask_names_briefly()
    home, network = connect(gather(from_environment()).rendezvous)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    step = profile_step(job, steps) if first else None
    found = None
    if network.rank == _LEADER:
        assert step is not None
        assert inside is not None
        found = _gathered(network, step, threads, inside, _name(job))
    elif step is None:
        network.send(_LEADER, Message(Kind.REPORT, pack_json(None)))
    else:
        network.send(_LEADER, Message(Kind.REPORT, pack_json([asdict(measure_host()), step.median_s])))
        answer_link(network, _LEADER)
    home.close()
    return found


def _gathered(
    network: Communicator, step: StepProfile, threads: int, inside: MeasuredLink, name: str
) -> Profile:
    hosts, speeds, links = [measure_host()], [1.0], []
    for rank in range(1, network.size):
        report = network.receive(rank)[1].tensor
        assert report is not None
        text = unpack_json(report)
        if text is None:
            continue
        facts, step_s = text
        hosts.append(Host(**{**facts, "accelerators": tuple(facts["accelerators"])}))
        speeds.append(step.median_s / step_s)
        links.append(measure_link(network, rank))
    between = max(links, key=_time_of_large, default=None)
    return Profile(tuple(hosts), tuple(speeds), threads, inside, between, step, name)


def _time_of_large(link: MeasuredLink) -> float:
    return link.latency_s + 1e6 / link.bandwidth_bytes_per_s
