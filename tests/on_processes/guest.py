"""A worker that joins a run by hand."""

from __future__ import annotations

import json
from pathlib import Path

from on_processes.brake import Brake
from on_processes.commands import Result, Started
from on_processes.verb import POLYRHYTHM


class Guest:
    """`polyrhythm join`, running.

    Args:
        folder: where it runs, which holds the run folder `run`.
        name: of the file that takes what it says.
        token_file: of the run token.
        place: that it will get.
        brake: on its network, if any.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        token_file: Path,
        place: str = "worker 2 (rank 2)",
        brake: Brake | None = None,
    ) -> None:
        told = json.loads((folder / "run" / "join.json").read_text())
        self.address = told["address"]
        self._place = place
        self._err = folder / f"{name}.err"
        words = ["join", told["address"], "--token-file", token_file, "--threads", "1"]
        self.command = Started([POLYRHYTHM, *words], folder, folder / name, brake=brake)

    def has_a_place(self) -> bool:
        """Whether it has said that it joins, and nothing else."""
        assert self.command.process.poll() is None, self._err.read_text()
        return self._err.exists() and self._err.read_text() == f"joins as {self._place}\n"

    def result(self) -> Result:
        """Waits for the end."""
        return self.command.result()
