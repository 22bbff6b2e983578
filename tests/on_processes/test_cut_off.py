"""A worker's host is cut off in silence: what becomes of the others is what strategies declare."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conformance.jobs import strategy
from on_processes.faults.cutting import cut_off
from polyrhythm.api.faults import REPRESENTATIVES, SENDING_IN_STEP, Fault, outcomes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")


@pytest.mark.parametrize("spec", REPRESENTATIVES + SENDING_IN_STEP)
def test_the_others_go_on_or_end_as_declared(spec: str, tmp_path: Path) -> None:
    assert cut_off(spec, tmp_path).fits(outcomes(strategy(spec))[Fault.CUT_OFF])
