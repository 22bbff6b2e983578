"""`--until` with real ranks: the run ends, and what resumes it has nothing to do."""

from __future__ import annotations

from pathlib import Path

from on_processes.commands import shell


def test_a_run_that_has_reached_its_target_is_done(tmp_path: Path) -> None:
    words = [
        "train",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--strategy",
        "parameter_server(servers=1)",
        "--json",
    ]
    words += ["--epochs", "40", "--until", "top1=0.6", "--out", "run"]
    (first,) = shell(tmp_path, words)
    assert first.figures["reached"] is True
    assert first.figures["epochs"] < 40
    assert (tmp_path / "run" / "model.safetensors").is_file()
    (again,) = shell(tmp_path, [*words, "--resume", "auto"])
    assert again.figures["parameters_sha256"] == first.figures["parameters_sha256"]
    assert "has reached its target already" in again.err
