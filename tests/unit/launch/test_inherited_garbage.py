"""What a forked child collects."""

from __future__ import annotations

import gc
import multiprocessing
import os
from contextlib import AbstractContextManager, nullcontext

import pytest

from polyrhythm.launch.children import left_to_the_parent


class Knot:
    """Holds itself, so that only the collector ends it, and says in whose process."""

    def __init__(self, pipe: int) -> None:
        self.itself = self
        self._pipe = pipe
        self._home = os.getpid()

    def __del__(self) -> None:
        os.write(self._pipe, b"home" if os.getpid() == self._home else b"away")


@pytest.mark.parametrize(
    ("around", "ended"),
    [(left_to_the_parent, b"home"), (nullcontext, b"awayhome")],
    ids=["left", "inherited"],
)
def test_a_child_ends_nothing_of_its_parent(around: type[AbstractContextManager[None]], ended: bytes) -> None:
    reader, writer = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    gc.disable()
    try:
        Knot(writer)
        with around():
            child.start()
        child.join()
    finally:
        gc.enable()
    gc.collect()
    assert os.read(reader, 64) == ended
    os.close(reader)
    os.close(writer)
