"""Which rank reports what is wrong when torchrun has started several ranks and all of them find the same.

Imports nothing that is slow: the command line asks before PyTorch is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from polyrhythm.errors import PolyrhythmError
from polyrhythm.launch.process import first_parent as first_parent

_LINGER_S = 10.0


class SaidByLeader(PolyrhythmError):
    """An error that rank 0 has found as well, and says."""


def started_by_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or something that speaks like it) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def leads() -> bool:
    """Whether this process is rank 0."""
    return os.environ.get("RANK") == "0"


def is_silent() -> bool:
    """Whether another rank speaks for this one."""
    return started_by_torchrun() and not leads()


@contextmanager
def leader_speaks() -> Iterator[None]:
    """Run what every rank does alike before they meet, and let only rank 0 report an error of it.

    Raises:
        SaidByLeader: in place of this project's other errors, on every rank but 0.
    """
    try:
        yield
    except PolyrhythmError as error:
        if is_silent():
            raise SaidByLeader(str(error)) from error
        raise


def linger() -> None:
    """Wait to be ended: torchrun ends all ranks as soon as one has failed, and rank 0 must be the first to fail."""
    with suppress(KeyboardInterrupt):
        time.sleep(_LINGER_S)
