"""An ensemble of real workers: members in processes of their own, side by side, and a student after them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polyrhythm
from polyrhythm.events import Event, Notice

JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "workers": 2,
    "threads": 1,
    "epochs": 1,
    "strategy": "ensemble(members=2)",
    "distill": "mlp(hidden=[16])",
}


class Notices:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.texts.append(event.text)

    def close(self) -> None:
        """Do nothing."""


def test_real_members_and_their_student_have_the_bits_of_simulated_ones_and_what_ended_is_kept(
    tmp_path: Path,
) -> None:
    said, folder = Notices(), tmp_path / "real"
    run = polyrhythm.train(out=folder, start_method="fork", observers=[said], **JOB)
    assert run is not None
    other = polyrhythm.simulate(cluster="office", out=tmp_path / "simulated", **JOB)
    for key in ("parameters_sha256", "test_top1", "ensemble"):
        assert run.figures[key] == other.figures[key]
    assert [each["parameters_sha256"] for each in run.figures["members"]] == [
        each["parameters_sha256"] for each in other.figures["members"]
    ]
    assert sum(text.startswith("member ") for text in said.texts) == 2

    kept = (folder / "member-0" / "events.jsonl").read_bytes()
    for name in ("member-1", "student"):
        shutil.rmtree(folder / name)
    for name in ("ensemble.json", "model.safetensors"):
        (folder / name).unlink()
    again = polyrhythm.train(resume=folder, start_method="fork")
    assert again is not None
    assert again.figures["parameters_sha256"] == run.figures["parameters_sha256"]
    assert (folder / "member-0" / "events.jsonl").read_bytes() == kept
    once_more = polyrhythm.train(out=folder, resume="auto", start_method="fork")
    assert once_more is not None
    assert once_more.before
    assert once_more.figures == again.figures
