"""What `polyrhythm profile` refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyrhythm.cli.main import _status

WRONG = {
    "steps": (["--steps", "4"], "a median of 4 steps is too noisy: measure at least 5"),
    "folder": (["--out", "nowhere/profile.yaml"], "there is no folder nowhere: make it first"),
    "model": (["--model", "lenet55", "--data", "digits"], "unknown model 'lenet55': did you mean lenet5"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_one_line(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused("profile", *arguments)


def test_what_to_try_next_is_of_the_same_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measured(*, out: str, threads: int, **job: object) -> dict[str, object]:
        times = dict.fromkeys(("step_s", "forward_s", "backward_s", "update_s", "data_s"), 0.1)
        inside = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
        layer = {"name": "fc", "kind": "Linear", "parameters": 250_000, "forward_s": 0.1, "backward_s": 0.1}
        update = {"seconds": 1e-4, "bandwidth_bytes_per_s": 2e9}
        told = {"hosts": [], "inside": inside, "between": None, "layers": [layer], "model": "a step"}
        return {"file": out, "threads": threads, "server_update": update, **times, **told}

    monkeypatch.setattr("polyrhythm.api.profile.profile", measured)
    job = ["--model", "mlp", "--data", "my photos", "--batch-size", "8", "--out", "here.yaml"]
    assert _status(["profile", *job]) == 0
    said = capfd.readouterr().out.replace(" \\\n            ", " ")  # lines that a shell joins
    assert "a step, 1 thread (" in said
    assert "server      0.60 ms for an update of 250,000 numbers and its answer, 1 thread (2.00 GB/s)" in said
    assert (
        "simulate --cluster here.yaml --model mlp --data 'my photos' --batch-size 8 --gradients none" in said
    )
