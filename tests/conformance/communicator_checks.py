"""What every communicator does: checks that each of three ranks runs, over whatever transport.

A check gets a communicator of its own, so that no message of one check can reach another.
"""

from __future__ import annotations

from conformance import collective_checks, group_checks, message_checks
from conformance.three_ranks import SIZE, Check
from polyrhythm.communication.communicator import Communicator

__all__ = ["CHECKS", "SIZE", "run"]

CHECKS: tuple[Check, ...] = (*message_checks.CHECKS, *group_checks.CHECKS, *collective_checks.CHECKS)


def run(check: Check, communicator: Communicator) -> None:
    """Runs a check in a message space of its own."""
    check(communicator.subgroup(check.__name__, range(communicator.size)))
