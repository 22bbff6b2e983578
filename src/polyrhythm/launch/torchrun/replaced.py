"""Ending with the start of a run whose worker 0 is gone and has been started again, however far this rank has come.

Whoever has a link to worker 0, or has seen its pulse, knows without this that it is lost. But it may die so early that
nobody has either; where torchrun then starts its host's ranks again alone, it waits for the others, and they for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.launch.torchrun.gathering import Gathered, newest_start

_LOOK_EVERY_S = 1.0


def leave_with_start(outside: Rendezvous, start: Gathered) -> None:
    """Ends this process with status 1, and a line, soon after worker 0 has begun another start of the run.

    Args:
        outside: of this rank, as its environment has it.
        start: that this process is of.
    """
    store = outside.store.clone()  # the run uses the other

    def watch() -> None:
        with suppress(RuntimeError):  # the store is gone, and the watchdog sees for how long
            while newest_start(store) == start.name:
                time.sleep(_LOOK_EVERY_S)
            print(
                f"error: rank 0 has been started again, and the run with it: rank {outside.rank} must start again too",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    threading.Thread(target=watch, name="replaced", daemon=True).start()
