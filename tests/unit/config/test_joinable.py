"""What is refused of a request to let others join, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyrhythm.api.train import automatic
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import CONFIG_FILE, configure
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import CheckpointConfig

GOOD = {"data": "digits", "model": "mlp", "strategy": "parameter_server", "workers": 3, "listen": "0"}


def test_places_are_kept_for_who_joins() -> None:
    job = assemble(configure(GOOD, {"vacant": 2, "notice_s": 30}), CheckpointConfig())
    assert (job.fault_tolerance.vacant, job.fault_tolerance.notice_s) == (2, 30)


def test_messages_are_bounded_by_the_job() -> None:
    job = assemble(configure(GOOD), CheckpointConfig())
    assert job.numbers == 64 * 64 + 64 + 64 * 10 + 10
    vector = 8 * job.numbers
    assert 12 * vector < job.most_message_bytes < 12 * vector + (1 << 28)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"listen": None, "vacant": 1}, "vacant is for runs that can be joined: give listen, too"),
        ({"listen": None, "token_file": "t"}, "token_file is for runs that can be joined"),
        ({"vacant": 3}, "vacant is 3 of 3 workers, but worker 0 starts here"),
        ({"strategy": "hybrid"}, "workers cannot join hybrid"),
        ({"strategy": "hogwild"}, "workers cannot join hogwild"),
        ({"freeze_epochs": 1}, "freeze_epochs makes two runs of one"),
        ({"model": torch.nn.Linear(64, 10)}, "guests find data and model by their names"),
    ],
)
def test_what_nobody_could_join_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(RequestError, match=f"^{complaint}"):
        assemble(configure(GOOD, changes), CheckpointConfig())


def test_the_same_request_begins_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert automatic(run, "auto") == (run, None)
    run.mkdir()
    assert automatic(run, "auto") == (run, None)
    (run / CONFIG_FILE).touch()
    assert automatic(run, "auto") == (None, run)
    assert automatic(None, "auto/") == (None, "auto/")  # a folder of that name
    assert automatic(run, None) == (run, None)
    with pytest.raises(RequestError, match="looks for a run in the folder of --out: name it"):
        automatic(None, "auto")
