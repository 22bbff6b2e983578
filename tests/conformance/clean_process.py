"""Where tests fork processes from: one that has only imported, never computed, so that it has one thread and no files.

What is imported there, no process of a test has to: two seconds of a core each.
"""

from __future__ import annotations

import multiprocessing
import os

# The store's library asks for the name of every address that it connects to. Where no name server answers, each
# connection would take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "polyrhythm.cli.main",
        "polyrhythm.api.train",
        "polyrhythm.launch.rank",
        "polyrhythm.reporting.progress",
        "polyrhythm.reporting.pages.report",
        "polyrhythm.simulation.run",
    ]
)
