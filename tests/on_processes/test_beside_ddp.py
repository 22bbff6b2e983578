"""`compare` with `ddp`: PyTorch's own, really run, takes the steps of `synchronous`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from on_processes.commands import shell


def test_ddp_takes_the_steps_of_synchronous_where_batches_are_full(tmp_path: Path) -> None:
    # 1438 training images are 2 times 719.
    words = [
        "compare",
        "--strategies",
        "synchronous; ddp",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--workers",
        "3",
    ]
    words += ["--batch-size", "719", "--epochs", "3", "--out", "both", "--json"]
    (done,) = shell(tmp_path, words)
    rows = done.figures["rows"]
    assert [(row["strategy"], row["outcomes"]) for row in rows] == [
        ("synchronous", ["done"]),
        ("ddp", ["done"]),
    ]
    ours, theirs = (load_file(tmp_path / row["runs"][0] / "model.safetensors") for row in rows)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # Rounding in float32; one image that weighs otherwise makes differences of a hundredth.
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "both" / "comparison.json").read_text()) == done.figures
    assert rows[0]["test_top1"]["mean"] == rows[1]["test_top1"]["mean"]
    assert rows[1]["images_per_s"]["mean"] > 0


def test_ddp_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    words = ["compare", "--strategies", "ddp", "--data", "digits", "--model", "mlp"]
    simulated, averaged = shell(
        tmp_path, [*words, "--cluster", "office"], [*words, "--weight-average", "0.9", "--out", "averaged"]
    )
    assert (simulated.status, averaged.status) == (2, 2)
    assert "runs for real" in simulated.complaint
    assert "--weight-average" in averaged.complaint
    assert not (tmp_path / "averaged").exists()
