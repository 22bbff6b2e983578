"""The loops of docs/migrate.md run as they stand there, and train the same model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from on_processes import comparison_task
from on_processes.commands import finished
from tolerances import REORDERED

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"


def test_ddp_and_synchronous_train_the_same_model(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = finished([*program, comparison_task.__file__, PAGE, tmp_path], tmp_path)
    assert done.status == 0, done.err
    before, after = (
        torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("before", "after")
    )
    torch.testing.assert_close(after, before, **REORDERED)
