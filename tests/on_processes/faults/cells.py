"""The cells of the table of faults: each lets one fault happen to real processes, and gives what became of the run.

None of them asks what the strategy declares; what is none of a fault's outcomes fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from on_processes.faults.cutting import cut_off
from on_processes.faults.erring import not_finite
from on_processes.faults.killing import leader_killed, server_killed, stopped, worker_killed
from on_processes.faults.seen import Seen
from on_processes.faults.storing import damaged, disk_full
from polyrhythm.api.faults import Fault

CELLS: dict[Fault, Callable[[str, Path], Seen]] = {
    Fault.WORKER_KILLED: worker_killed,
    Fault.LEADER_KILLED: leader_killed,
    Fault.SERVER_KILLED: server_killed,
    Fault.STOPPED: stopped,
    Fault.CUT_OFF: cut_off,
    Fault.NOT_FINITE: not_finite,
    Fault.DISK_FULL: disk_full,
    Fault.DAMAGED: damaged,
}
"""Takes a strategy's spec, and an empty folder."""
