"""A worker that joins a run by hand."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from multiprocess.commands import POLYRHYTHM, Result, environment


class Guest:
    """`polyrhythm join`, running.

    Args:
        folder: where it runs, which holds the run folder `run`.
        name: of the file that takes what it says.
        token_file: of the run token.
        place: that it will get.
    """

    def __init__(self, folder: Path, name: str, token_file: Path, place: str = "worker 2 (rank 2)") -> None:
        told = json.loads((folder / "run" / "join.json").read_text())
        self.address = told["address"]
        self._place = place
        self._err = folder / f"{name}.err"
        with self._err.open("w") as err:
            self.process = subprocess.Popen(
                [POLYRHYTHM, "join", told["address"], "--token-file", str(token_file), "--threads", "1"],
                cwd=folder,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )

    def has_a_place(self) -> bool:
        """Whether it has said that it joins, and nothing else."""
        assert self.process.poll() is None, self._err.read_text()
        return self._err.read_text() == f"joins as {self._place}\n"

    def result(self) -> Result:
        """Waits for the end."""
        status = self.process.wait(120)
        return Result(status, "", self._err.read_text())
