"""Waiting for a collective of the library, which is looked after now and then."""

import pytest

from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.torch_distributed.collectives import CollectiveHandle


class Work:
    """A collective that ends while somebody is told that it takes long."""

    def __init__(self, error=None):
        self.error = error
        self.ended = False

    def is_completed(self):
        return self.ended

    def wait(self, patience=None):
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error


def test_what_ends_just_after_the_patience_has_ended_well():
    finished, failed = [], []
    handle = CollectiveHandle(Work(), lambda: finished.append(True), failed.append)
    handle.wait()
    assert handle.done()
    assert (finished, failed) == ([True], [])


def test_what_breaks_just_after_the_patience_is_told_with_its_own_reason():
    failed = []
    handle = CollectiveHandle(Work(RuntimeError("Connection closed by peer")), None, failed.append)
    with pytest.raises(CollectiveBroken, match="Connection closed by peer"):
        handle.wait()
    assert failed == ["Connection closed by peer"]
