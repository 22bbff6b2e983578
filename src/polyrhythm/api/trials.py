"""Trying a strategy under the faults of many seeds, as the verb `simulate --seeds` does it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from polyrhythm.api.simulate import described_cluster, laid_out
from polyrhythm.config.options import RunOptions, refuse_real_only
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.config.rehearsal import assemble_rehearsal, check_rehearsable
from polyrhythm.errors import RequestError
from polyrhythm.launch.cores import computing_with
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.injection.fault import Fault, parse_faults
from polyrhythm.simulation.step_time import StepTime
from polyrhythm.simulation.trials import Failure, Trial, Tried, try_seeds


def try_strategy(  # noqa: PLR0913 - what a user may say, all by name
    recipe: str | Path | None = None,
    *,
    cluster: str | Path | Cluster,
    seeds: int,
    steps: int | None = None,
    step_time: str | StepTime | None = None,
    faults: str | Sequence[str | Fault] | None = None,
    on_failure: Callable[[Failure], bool] = lambda failure: True,
    **options: Unpack[RunOptions],
) -> Tried:
    """Rehearses a strategy with many seeds under faults, while its invariants are watched.

    Nothing is written. What fails is repeated by the command that it comes with.

    Args:
        recipe: a YAML file of options.
        cluster: the name of a ready cluster, a cluster file, or a cluster.
        seeds: how many to try, from `seed` on.
        steps: that every worker takes.
        step_time: compute time of a step instead of the cluster's.
        faults: of every seed, beside the cluster's own; None draws some from each seed.
        on_failure: is told every failure; says whether to go on.
        **options: as for `simulate` with `gradients="none"`.

    Raises:
        RequestError: something in the request is wrong.
    """
    if seeds < 1:
        raise RequestError(f"seeds must be at least 1 (given {seeds})")
    refuse_real_only(options)
    check_rehearsable(options, steps)
    config = configure(read_recipe(Path(recipe)) if recipe is not None else {}, options)
    where = described_cluster(cluster, step_time, ())
    rehearsal, _ = assemble_rehearsal(config, steps)
    layout = laid_out(where, rehearsal)
    given = None if faults is None else parse_faults(faults)
    for fault in given or ():
        fault.check(layout)
    said: dict[str, Any] = {
        "cluster": where.name if isinstance(cluster, Cluster) else cluster,
        "steps": steps,
    }
    said |= {"step_time": step_time, **options}

    def command(seed: int, tried: str) -> str:
        return _command(recipe, {**said, "faults": tried or None, "seed": seed})

    trial = Trial(layout=layout, rehearsal=rehearsal, faults=given, command=command)
    with computing_with(1):
        return try_seeds(trial, range(config.seed, config.seed + seeds), on_failure=on_failure)


def _command(recipe: str | Path | None, options: dict[str, Any]) -> str:
    """Gives the command that rehearses one seed; a cluster or a strategy of one's own goes by its name."""
    words = ["polyrhythm", "simulate", *([str(recipe)] if recipe is not None else [])]
    words += ["--gradients", "none", "--check"]
    for key, value in options.items():
        if value is True:
            words.append(f"--{key.replace('_', '-')}")
        elif value is not None and value is not False:
            words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(words)
