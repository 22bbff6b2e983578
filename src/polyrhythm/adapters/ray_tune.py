"""Ray Tune: searches with runs of Polyrhythm as trials, which Ray samples, places, compares and stops early.

    from ray import tune
    from polyrhythm.adapters.ray_tune import trainable

    space = {
        "strategy": tune.choice(["synchronous", "local_sgd(steps={period})"]),
        "period": tune.choice([2, 8, 32]),
        "lr": tune.loguniform(0.001, 0.3),
    }
    trial = trainable(data="digits", model="mlp", workers=2, epochs=8, out="runs/search")
    settings = tune.TuneConfig(metric="top1", mode="max", num_samples=12)
    found = tune.Tuner(trial, param_space=space, tune_config=settings).fit()

Names in the space are those of `polyrhythm tune`: any option of a run, `lr`, and names in braces. Each trial is an
ordinary run folder, so `polyrhythm compare` and `report` read it.

    Ray's actor of a trial            a process that makes runs (api/run_process.py)         its ranks
    settings                    ──▶   a run in OUT/TRIAL                               ──▶   train
    tune.report                 ◀──   after every test

If Ray ends a trial early, its actor is killed, the process loses its reporter, and its ranks end with it. A trial that
Ray begins again (`tune.FailureConfig`) continues from its last checkpoint.

Ray is an optional dependency: `pip install polyrhythm[ray]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.api.run_process import FIGURES, RunProcess
from polyrhythm.api.tune import trial_options
from polyrhythm.config.assemble import data_of
from polyrhythm.config.recipe import configure, read_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError, RunError
from polyrhythm.search.space import LEFT_OUT, Space

try:
    from ray import tune
except ImportError as error:
    raise RequestError("Ray is not installed: pip install polyrhythm[ray]") from error

TESTED = {"top1": "test_top1", "top5": "test_top5", "loss": "test_loss"}
"""Reported names of a test's values, and the results that hold the same values of the last test."""


def trainable(
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    cluster: str | Path | None = None,
    gpus: float = 0.0,
    **options: Any,
) -> Callable[[dict[str, Any]], None]:
    """Return the function that Ray's `Tuner` runs for every sample of its space.

    It reports `epoch`, `top1`, `top5` and `loss` after every test, and with the last one, once the run is whole, the
    figures `images_per_s`, `seconds`, `price` and `reached`, and `folder`. It asks Ray for a core a worker and thread
    (one for a trial that is simulated), and `threads` is 1 unless it is given.

    Args:
        out: the folder of all run folders, on a file system that all nodes of Ray's cluster share.
        recipe: a YAML file of options that all trials have.
        cluster: simulate on it; None: the runs are real.
        gpus: GPUs of a trial, as Ray counts them.
        **options: any field of `RunConfig` that all trials share; the space has precedence.

    Raises:
        RequestError: the options are wrong. In a trial, which then counts as failed: the choice cannot be.
    """
    folder = Path(out).absolute()  # Ray's workers have another working directory
    simulation = {} if cluster is None else {"cluster": _found(cluster)}
    common = {**(read_recipe(Path(recipe)) if recipe is not None else {}), **options}
    if not simulation:
        common.setdefault("threads", 1)
    if isinstance(data := common.get("data"), str | Path) and Path(data).exists():
        common["data"] = str(Path(data).absolute())
    configure(common)

    def trial(settings: dict[str, Any]) -> None:
        wanted = chosen(common, settings)
        config = configure(wanted)
        last = _epochs(config)
        there = folder / tune.get_context().get_trial_id()

        def judge(epoch: int, tested: Mapping[str, float]) -> bool:
            if (
                epoch != last
            ):  # after the last one a scheduler may end the trial, and the run is not whole yet
                tune.report({"epoch": epoch, **tested})
            return True

        process = RunProcess()
        try:
            task = {"folder": str(there), "simulation": simulation, "options": wanted}
            answer = process.make(task, judge)
        finally:
            process.close()
        if answer["outcome"] == "refused":
            raise RequestError(answer["error"])
        if answer["outcome"] != "done":
            raise RunError(answer.get("error", "the run was interrupted"))
        figures = {key: answer[key] for key in FIGURES if answer.get(key) is not None}
        results = {name: figures.pop(figure) for name, figure in TESTED.items() if figure in figures}
        tune.report({"epoch": figures.pop("epochs"), **results, **figures, "folder": str(there)})

    def place(settings: dict[str, Any]) -> tune.PlacementGroupFactory:
        wanted = chosen(common, settings)
        cores = 1 if simulation else wanted["workers"] * (wanted.get("threads") or 1)
        return tune.PlacementGroupFactory([{"CPU": cores, **({"GPU": gpus} if gpus else {})}])

    return tune.with_resources(trial, place)  # type: ignore[no-any-return]


def chosen(common: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run, by those of all trials and what Ray has drawn for this one.

    Raises:
        RequestError: a name of the space is no option of a run.
    """
    fixed = {key: value for key, value in settings.items() if key in LEFT_OUT}
    drawn = {
        key: [value] for key, value in settings.items() if key not in LEFT_OUT
    }  # each then has a single value
    return trial_options({**common, **fixed}, Space.of(drawn) if drawn else Space({}, {}), {})


def _found(cluster: str | Path) -> str:
    """Return a cluster file with its whole path, a ready cluster by its name."""
    return str(Path(cluster).absolute()) if Path(cluster).is_file() else str(cluster)


def _epochs(config: RunConfig) -> int | None:
    """Return after which epoch a run makes its last test; None if that is not counted in epochs."""
    if config.updates is not None:
        return None
    return config.epochs or data_of(config).default_epochs
