"""What a process of a run arranges with its operating system: its parent, its name server, its freed memory.

It ends with the process that has started it, however that one ends. It does not wait long for a name server
that does not answer. It keeps memory that a step frees for the next one: a forward and a backward pass take
and free the same blocks in every step. glibc gives large ones back to the system at once, which then fills
every page with zeros again when the next step first writes to it: 350 to 4,000 page faults a step of
`lenet5`, 11,000 of `resnet18`, and 4 to 7 % of their time.

Imports nothing that is slow: the command line imports it first, while its parent most likely lives.
"""

from __future__ import annotations

import ctypes
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
    """Return the process that has started this one, even if it is gone."""
    return _PARENT.number


def leave_with(parent: int) -> None:
    """End this process soon after its parent has died, from now on.

    Args:
        parent: its number.
    """
    threading.Thread(target=_leave_with, args=(parent,), name="parentage", daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def ask_names_briefly() -> None:
    """Keep a name server that does not answer from delaying this process's connections; call it before the first.

    To log it, torch looks up the name of every address that it connects to, even of loopback, one after the other.
    The resolver's usual patience is 5 seconds for each, and twice that.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ALL_BYTES = 2**31 - 1
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""More is refused by glibc; still larger blocks come from the system every time."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to the most that it ever needed at once.

    Returns:
        Whether it does: another C library than glibc is left as it is.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is None:
        return False
    return bool(choose(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)) and bool(
        choose(_TRIM_THRESHOLD, _ALL_BYTES)
    )
