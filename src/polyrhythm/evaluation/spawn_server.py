"""Imported by the server of spawned processes: signals to all processes of a terminal or a job do not end it.

It blocks them from here on. Its forks do not: one of ours takes the mask of the process that requested it, and the
server may have forks of other libraries. In any other process the import changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import forkserver

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING))
