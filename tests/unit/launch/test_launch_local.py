"""How a local run shares out its cores."""

from __future__ import annotations

import pytest

from polyrhythm.config.assemble import strategy_from
from polyrhythm.launch.devices import threads_for_worker


@pytest.mark.parametrize(
    ("cores", "workers", "strategy", "threads"),
    [
        (8, 2, "synchronous", 4),
        (8, 3, "synchronous", 2),
        (2, 4, "synchronous", 1),
        (8, 2, "parameter_server(servers=2)", 4),
        (8, 2, "parameter_server(servers=2, placement=dedicated)", 3),
        (2, 2, "parameter_server(servers=2, placement=dedicated)", 1),
    ],
)
def test_cores_are_shared_out(cores: int, workers: int, strategy: str, threads: int) -> None:
    assert threads_for_worker(cores, workers, strategy_from(strategy)) == threads
