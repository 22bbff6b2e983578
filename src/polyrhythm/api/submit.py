"""Handing a job to an engine, for the verb `submit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.api.observed_run import RUNS
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.ensemble import Ensemble
from polyrhythm.config.model import name_of
from polyrhythm.config.recipe import configure, read_recipe, read_run_folder
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.stages import Stages
from polyrhythm.errors import RequestError
from polyrhythm.specs import build
from polyrhythm.submission.engine import ENGINES, Engine, Outcome, Submission

ALONE = ("compare", "tune", "simulate", "plan", "evaluate", "profile", "predict", "export")
"""Verbs of one process, which an engine starts as one task."""


def submit(
    engine: str,
    verb: str = "train",
    recipe: str | Path | None = None,
    *,
    wait: bool = False,
    dry_run: bool = False,
    notify: Callable[[str], None] = print,
    **options: Any,
) -> Outcome | Mapping[str, str]:
    """Hand a job to an engine that places it on machines, queues it and starts it again.

    Args:
        engine: name of the engine, with its keys: `slurm(nodes=2)`, `ray`, `kubernetes(image='…')` or
            `ssh(hosts='hosts.txt')`.
        verb: verb to run there, such as `train`.
        recipe: a file of options, as the verb takes it.
        wait: stay until the job has ended; engines without a queue (ray, ssh) always do.
        dry_run: hand nothing in, and return the texts that the engine would get, by file name.
        notify: receiver of lines for the user.
        **options: options of the verb, as in Python or a recipe.

    Returns:
        The engine's name for the job, and what became of it; or the texts.

    Raises:
        RequestError: the job or the engine's keys are wrong, the engine is not there, or it refuses the job.
    """
    given = {key: value for key, value in options.items() if value is not None}
    words = [verb, *([str(recipe)] if recipe is not None else []), *_words(given)]
    chosen = engine_from(engine)
    submission = submission_of(chosen, words, {**given, "recipe": recipe})
    if dry_run:
        return chosen.texts(submission)
    return chosen.submit(submission, notify, wait)


def engine_from(spec: str) -> Engine:
    """Build an engine from its spec; RequestError: unknown name or key, or a value out of range."""
    made = build("engine", spec, ENGINES)
    assert isinstance(made, Engine)
    return made


def submission_of(engine: Engine, words: Sequence[str], given: Mapping[str, Any]) -> Submission:
    """Return a command as an engine takes it, after a look at what can be known to be wrong with it here.

    Args:
        engine: engine to submit to.
        words: words of the command line, verb first.
        given: the values of its options.

    Raises:
        RequestError: the command is wrong, or nothing for an engine.
    """
    verb = words[0]
    here = Path.cwd()
    if verb in ALONE:
        if verb == "tune" and given.get("out") is None and given.get("resume") is None:
            # the same for all jobs of an array, and for a requeued one
            words = [*words, "--out", str(RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-tune")]
        return Submission(tuple(words), 1, 0, None, None, here, f"polyrhythm-{verb}")
    if verb != "train":
        raise RequestError(f"an engine cannot {verb}: it takes train, {', '.join(ALONE[:-1])} or {ALONE[-1]}")
    config = _configured(given)
    servers, several = _servers_of(config)
    if several and engine.sets_servers_apart:
        raise RequestError(
            f"server_options place the servers of one strategy apart, and {config.strategy} has others for each member "
            "or at other times: leave server_options out"
        )
    folder, sent = given.get("out"), _without(words, "--workers")
    if given.get("resume") not in (None, "auto"):
        folder = given["resume"]
    elif folder is None:
        strategy = str(config.strategy).partition("(")[0]
        folder = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy}-{name_of(config.model)}"
        sent += ["--out", str(folder)]
    if given.get("resume") is None:
        sent += ["--resume", "auto"]
    if engine.warns_s and config.notice_s is None:
        sent += ["--notice-s", str(engine.warns_s)]
    data = config.data if isinstance(config.data, str) and _is_path(config.data) else None
    return Submission(tuple(sent), config.workers, servers, Path(folder), data, here, Path(folder).name)


def _servers_of(config: RunConfig) -> tuple[int, bool]:
    """Return the servers of a run: of all members of an ensemble, and of stages those of the one with most.

    Also returns whether it is one of these.
    """
    ensemble = Ensemble.parse(str(config.strategy))
    members = [config] if ensemble is None else ensemble.member_configs(config)
    servers, several = 0, ensemble is not None
    for member in members:
        stages = Stages.parse(str(member.strategy))
        several = several or stages is not None
        named = [member.strategy] if stages is None else [stage.strategy for stage in stages.stages]
        servers += max(strategy_from(each, config.compress).traits(member.workers).servers for each in named)
    return servers, several


_OF_THE_VERB = {"recipe", "out", "resume", "json"}


def _configured(given: Mapping[str, Any]) -> RunConfig:
    recipe, resume = given.get("recipe"), given.get("resume")
    options = {key: value for key, value in given.items() if key not in _OF_THE_VERB and value is not None}
    layers: list[Mapping[str, object]] = [read_recipe(Path(recipe))] if recipe is not None else []
    if resume not in (None, "auto"):
        layers = [read_run_folder(Path(str(resume)))]
    return configure(*layers, options)


def _is_path(data: str) -> bool:
    return "/" in data or Path(data).exists()


def _without(words: Sequence[str], option: str) -> list[str]:
    """Return the words without an option and its value: ranks learn from the engine how many workers there are."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == option:
            skip = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _words(options: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in options.items():
        name = f"--{key.replace('_', '-')}"
        words += [name] if value is True else [] if value is False else [name, str(value)]
    return words
