"""Engines: their input and their result.

    polyrhythm submit --engine "slurm(nodes=2)" -- train recipe.yaml --workers 4
                       │                           │
                       Engine                      Submission: the words, the ranks, the run folder
                       │
                       ├─ texts()    the files that it is handed: a script, manifests, a plan (`--dry-run` prints them)
                       └─ submit()   hands them in; engines without a queue stay until the job has ended

An engine places processes, queues them and starts them again. What they do is training as it is anywhere else: ranks
find each other by torchrun's variables (`launch/torchrun/`), and `--resume auto` continues a job that was requeued.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

ENGINES = "polyrhythm.submission.engines"
"""The folder that lists them."""


@dataclass(frozen=True)
class Submission:
    """A command for an engine.

    Attributes:
        words: words of the command line, after `polyrhythm`, for every rank alike.
        workers: ranks that train; 1 where the verb needs one process only.
        servers: ranks that own parameters, on top.
        folder: folder of the run; None where the verb has none.
        data: the folder of images that the command names, if it names one.
        directory: directory where paths of the command begin.
        name: name of the job.
    """

    words: tuple[str, ...]
    workers: int
    servers: int
    folder: Path | None
    data: str | None
    directory: Path
    name: str

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.workers + self.servers


@dataclass(frozen=True)
class Outcome:
    """Result of a submission.

    Attributes:
        job: the engine's name for it.
        status: exit status of the job; None: it has not ended, and the engine continues it.
        remark: the user's next step, or the reason for the end of the job, in a line.
    """

    job: str
    status: int | None
    remark: str


class Engine(Config):
    """Something that places processes on machines."""

    @property
    def warns_s(self) -> int:
        """Seconds between its warning and the end of a job; 0: it gives none."""
        return 0

    @property
    def sets_servers_apart(self) -> bool:
        """Whether servers were asked for on machines of their own."""
        return False

    @abstractmethod
    def texts(self, submission: Submission) -> Mapping[str, str]:
        """Return the texts for the engine (scripts, manifests) by file name.

        Raises:
            RequestError: the engine cannot do what the command asks for.
        """

    @abstractmethod
    def submit(self, submission: Submission, notify: Callable[[str], None], wait: bool) -> Outcome:
        """Hand the job in.

        Args:
            submission: the command.
            notify: receiver of lines for the user.
            wait: whether to stay until the job has ended.

        Raises:
            RequestError: the engine is not there, or refuses the job; nothing runs.
        """


def needed(program: str, install: str) -> str:
    """Return the path of a program of the engine.

    Raises:
        RequestError: it is not there.
    """
    found = shutil.which(program)
    if found is None:
        raise RequestError(
            f"{program} is not on this host: {install}, or see what it would get with --dry-run"
        )
    return found
