"""The simulation against two hosts that exist, very short; see benchmarks/simulator-fidelity for the study."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

MEASURE = Path(__file__).parents[2] / "benchmarks" / "simulator-fidelity" / "measure.py"
STRATEGY = "parameter_server(servers=1, consistency=synchronous)"


def test_real_ranks_on_shaped_links_are_as_fast_as_simulated(tmp_path: Path) -> None:
    options = [
        "--megabits",
        "100",
        "--hosts",
        "2",
        "--strategies",
        STRATEGY,
        "--seconds",
        "2",
        "--out",
        tmp_path,
    ]
    subprocess.run([sys.executable, str(MEASURE), *map(str, options)], check=True, timeout=200)
    (row,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]
    # A step computes 50 ms and moves 0.5 MB there and back over 12.5 MB/s: each of two workers takes at least 130 ms.
    assert row["measured_steps_per_s"] < 2 / 0.130
    assert row["simulated_steps_per_s"] == pytest.approx(row["measured_steps_per_s"], rel=0.3)
