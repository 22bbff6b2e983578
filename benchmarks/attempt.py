"""A training run in a process of its own, which can be killed, rank by rank or as a whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from polyrhythm.api.train import train
from polyrhythm.errors import PolyrhythmError

LONGEST_S = 60.0


def _child(folder: Path, options: dict[str, Any], resume: bool, pipe: Connection) -> None:
    with (folder.parent / "words").open("a") as words:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
    try:
        given: dict[str, Any] = {"resume" if resume else "out": folder, **options}
        run = train(start_method="fork", **given)
        assert run is not None
        pipe.send(("done", run.figures))
    except PolyrhythmError as error:
        pipe.send(("failed", str(error)))


class Attempt:
    """A run, or a resumption of it, in a process of its own.

    Args:
        folder: of the run.
        options: of a new one.
        resume: whether it is a resumption.
        changed: what is other than before then.
    """

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        *,
        resume: bool = False,
        changed: dict[str, Any] | None = None,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        asked = (changed or {}) if resume else options
        self.process = context.Process(target=_child, args=(folder, asked, resume, theirs))
        self.process.start()
        theirs.close()

    def wait_for_ranks(self, count: int) -> None:
        """Returns when so many live, or the run is over."""
        while len(self.ranks()) < count and self.process.is_alive():
            time.sleep(0.002)

    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order."""
        pid = self.process.pid
        with suppress(FileNotFoundError):
            text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            return [int(child) for child in text.split()]
        return []

    def end(self, patience_s: float = LONGEST_S) -> tuple[str, Any]:
        """Waits for the end; gives how it was: `done`, `failed`, `killed` or `hung`, and figures or words."""
        ranks = self.ranks()
        if not self._pipe.poll(patience_s):
            for pid in [*self.ranks(), self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(int(pid or 0), signal.SIGKILL)
            self.process.join()
            return "hung", f"no end after {patience_s:g} s"
        try:
            ending: tuple[str, Any] = self._pipe.recv()
        except EOFError:
            ending = "killed", None
        self.process.join()
        # Orphans look for their launcher every second.
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            time.sleep(0.02)
        return ending


def prepare() -> None:
    """Imports here what every child would."""
    import plotly.graph_objects
    import torch._dynamo

    from polyrhythm.config.assemble import assemble
    from polyrhythm.config.recipe import configure
    from polyrhythm.reporting.pages import plots, report
    from polyrhythm.roles.job import CheckpointConfig

    assert all((plotly.graph_objects, torch._dynamo, plots, report))
    job = assemble(configure({"data": "digits", "model": "mlp"}), CheckpointConfig())
    job.learning.optimizer.create(list(job.make_model().parameters()))
