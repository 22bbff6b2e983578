"""The folder of a run: where it is, and what it says of its surroundings."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polyrhythm.claim import Claim, claim, is_staging
from polyrhythm.config.recipe import CONFIG_FILE, write_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.launch.cores import available_cores
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import FOLDER

RUNS = Path("runs")


def choose(out: str | Path | None, name: str) -> Path:
    """Chooses the folder of a new run; makes nothing.

    Args:
        out: as the user wishes; None takes a new one under `runs/`.
        name: for that one.

    Raises:
        RequestError: something is there already.
    """
    if out is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        candidates = (
            RUNS / f"{stamp}-{name}{suffix}" for suffix in ["", *(f"-{number}" for number in range(2, 100))]
        )
        return next(folder for folder in candidates if not folder.exists())
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file: name a folder with --out")
    if folder.is_dir() and not _is_bare(folder):
        if not (folder / CONFIG_FILE).exists():
            raise RequestError(f"{folder} is not empty, and holds no run: name another with --out")
        raise RequestError(
            f"{folder} already holds another run: name another with --out, or continue it with --resume {folder}"
        )
    return folder


def _is_bare(folder: Path) -> bool:
    """Whether nothing is there, or what a start has left that was killed before it wrote anything."""
    return all(
        is_staging(path) or (path.name == FOLDER and path.is_dir() and all(map(is_staging, path.iterdir())))
        for path in folder.iterdir()
    )


def create(folder: Path, config: RunConfig, job: Job) -> Claim:
    """Makes the folder of a job with `config.yaml` and `environment.json`, and claims it.

    Raises:
        RequestError: it cannot be written.
        Superseded: a later start has claimed it.
    """
    return create_for(folder, _settled(config, job), str(job.device))


def create_for(folder: Path, config: RunConfig, device: str) -> Claim:
    """Makes a folder with `config.yaml` and `environment.json`, and claims it.

    Args:
        folder: new or empty.
        config: with nothing left open.
        device: where replicas live.

    Raises:
        RequestError: it cannot be written.
        Superseded: a later start has claimed it.
    """
    existed, own = folder.exists(), None
    path, environment = folder / CONFIG_FILE, folder / "environment.json"
    try:
        own = claim(folder, [FOLDER] if config.keep_checkpoints else [])
        write_recipe(config, own.draft(path))
        own.publish(path)
        text = json.dumps(_environment(config, device), indent=2) + "\n"
        own.draft(environment).write_text(text, encoding="utf-8")
        own.publish(environment)
        return own
    except OSError as error:
        if own is not None:
            own.release()
        if not existed:
            discard(folder)
        raise RequestError(
            f"cannot write into {folder}: {error.strerror}; name another folder with --out"
        ) from None


def discard(folder: Path) -> None:
    """Removes a new run's folder: its run has not started."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others' runs are in there, or it is not ours
        RUNS.rmdir()


def _settled(config: RunConfig, job: Job) -> RunConfig:
    """Fills in what was left to us, so that the recipe gives this run again whatever later defaults are."""
    chosen = {"epochs": job.learning.epochs, "optimizer": str(job.learning.optimizer)}
    return config.model_copy(update=chosen)


def _environment(config: RunConfig, device: str) -> dict[str, Any]:
    return {
        "polyrhythm": version("polyrhythm"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": available_cores(),
        "device": device,
        "threads_per_worker": config.threads or "a share of the cores",
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "process": os.getpid(),
    }


def _cpu() -> str:
    """Names the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
