"""The ranks that benchmarks play on shaped hosts."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from on_processes.commands import finished

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

_PRINT_POLICIES = """
import os
from contextlib import suppress

import torch
from namespaces import shaped_hosts
from ranks import on_hosts

def policies(network):
    network.all_reduce(torch.ones(1000))  # now all threads are there
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(os.sched_getscheduler(int(thread)))
    network.barrier()
    return sorted(found)

with shaped_hosts(2, 1e9) as hosts:
    print([on_hosts(hosts, policies, computes=computes) for computes in (False, True)])
"""


def test_all_threads_of_a_rank_have_one_priority() -> None:
    """If some went before others, they would find locks taken by those who cannot go, until the kernel steps in."""
    done = finished([sys.executable, "-c", _PRINT_POLICIES], BENCHMARKS)
    assert done.status == 0, done.err
    assert ast.literal_eval(done.out) == [[[os.SCHED_RR]] * 2, [[os.SCHED_OTHER]] * 2]
