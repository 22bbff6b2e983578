"""The way to a host is cut for less than the watchdog's limit: nobody is lost, and all go on."""

from __future__ import annotations

import os

import pytest

from on_processes.faults.cutting import cut_for
from polyrhythm.launch.watchdog import LOST_AFTER

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

SILENCE_S, CUT_S = 1.2, 4.2
"""TCP sends again what this swallows after 3 s, and then only after 6.2 s, when the limit has long passed."""


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server"])
def test_a_cut_that_is_shorter_than_the_limit_does_nothing(spec: str) -> None:
    assert LOST_AFTER * SILENCE_S > CUT_S
    said, _ = cut_for(spec, CUT_S, SILENCE_S)
    assert said == set()
