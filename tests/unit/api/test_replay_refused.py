"""Runs whose result no order of messages decides are not replayed."""

from pathlib import Path

import pytest

from polyrhythm.api.replay import _job, replay
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError


def test_a_run_on_shared_memory_is_refused():
    config = configure({"data": "digits", "model": "mlp", "strategy": "hogwild", "workers": 2})
    with pytest.raises(RequestError, match="with shared memory: the order of reads is not recorded"):
        _job(Path("runs/one"), config, None)


def test_a_simulation_is_repeated_instead(tmp_path):
    for name in ("config.yaml", "cluster.yaml"):
        (tmp_path / name).touch()
    with pytest.raises(RequestError, match="is a simulation, which is the same every time: repeat it with"):
        replay(tmp_path)
