"""How long a host may still be used after its notice has come."""

from __future__ import annotations

import os

import pytest

from polyrhythm.launch.signals import PREEMPTED, Preempted, Preemption


def test_nine_tenths_of_the_notice_may_be_used() -> None:
    now = [100.0]
    preemption = Preemption(20.0, lambda: now[0])
    preemption.check("continue")
    assert (preemption.is_possible, preemption.begun, preemption.left_s) == (True, False, None)
    preemption.begin()
    assert (preemption.begun, preemption.left_s) == (True, pytest.approx(18))
    now[0] = 117.5
    preemption.begin()  # a second SIGTERM gives no more time
    assert preemption.left_s == pytest.approx(0.5)
    preemption.check("continue")
    now[0] = 118.01
    assert preemption.left_s == 0
    with pytest.raises(
        Preempted, match=r"the notice of 20 s ran out .*: continue with --resume a, from the last one$"
    ):
        preemption.check("continue with --resume a")


def test_without_a_notice_sigterm_is_no_preemption() -> None:
    preemption = Preemption(None)
    preemption.begin()
    preemption.check("")
    assert (preemption.is_possible, preemption.begun, preemption.left_s) == (False, False, None)


def test_the_status_is_the_systems_invitation_to_try_again() -> None:
    assert PREEMPTED == os.EX_TEMPFAIL
