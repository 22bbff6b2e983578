"""Who of some processes has ended, also where another thread stops watching meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from polyrhythm.communication.transports.shared_memory.barrier import Lifelines

MEANWHILE_S = 0.2
"""In which another thread has closed what nobody keeps it from closing."""


def test_who_has_ended_is_known_and_stays_known() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    lifelines = Lifelines([os.getpid(), child.pid])
    assert lifelines.ended() == set()
    child.communicate(timeout=60)
    assert lifelines.ended() == {1}
    lifelines.close()
    assert lifelines.ended() == {1}


def test_nobody_is_taken_for_ended_who_is_watched_no_longer() -> None:
    """Descriptors are closed on another thread when a communicator is given up, where this one may just look."""
    lifelines = Lifelines([os.getpid()])
    closing = threading.Thread(target=lifelines.close)
    watched = lifelines._poll

    class Poll:
        def poll(self, timeout: int) -> list[tuple[int, int]]:
            closing.start()
            closing.join(MEANWHILE_S)
            return watched.poll(timeout)

    lifelines._poll = Poll()  # type: ignore[assignment]
    assert lifelines.ended() == set()
    closing.join(60)
    assert not closing.is_alive()
    assert lifelines.ended() == set()
