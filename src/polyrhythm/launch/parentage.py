"""Ending with whoever has started this process, however that one ends.

Imports nothing that is slow: the command line does it first, while its parent most likely lives.
"""

from __future__ import annotations

import os
import threading
import time

_LOOK_EVERY_S = 1.0


class _Parent:
    """The process that has started this one; who asks only after PyTorch is there may find that it has died."""

    def __init__(self) -> None:
        self.number = os.getppid()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.number = os.getppid()


_PARENT = _Parent()


def first_parent() -> int:
    """Gives the process that has started this one, even if it is gone."""
    return _PARENT.number


def leave_with(parent: int) -> None:
    """Ends this process soon after its parent has died, from now on.

    Args:
        parent: its number.
    """
    threading.Thread(target=_leave_with, args=(parent,), name="parentage", daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
