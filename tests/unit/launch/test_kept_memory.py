"""Freed memory that is kept causes no page faults when it is taken again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes
import resource
import torch
from polyrhythm.launch.process import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.empty(4 << 20, dtype=torch.uint8).fill_(1) for _ in range(10)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for parameter in (-1, -3):  # give all back at once, as glibc begins to do in every process
    assert ctypes.CDLL(None).mallopt(parameter, 128 << 10)
given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


def test_memory_that_is_taken_again_has_hardly_any_page_faults() -> None:
    """In a process of its own, since nothing takes it back."""
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )
    before, after = map(int, told.stdout.split())
    assert before > 200  # of 4 KiB or, at most, 2 MiB
    assert after < before / 10
