"""Garbage of a process that forks: its children have it too, and must not collect it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_to_the_parent() -> Iterator[None]:
    """Lets a child that is forked meanwhile never collect what was garbage before.

    The end of a store that nobody uses any more waits for threads, which a fork does not copy: a child that came upon
    such a store would crash.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
