"""Compare bits as on other processors: other instruction sets, other rounding by address, other numbers of threads.

    python scripts/run_portable_tests.py [--sample]

Of the folders below, those files are run that compare bits: whole with products rounded by address and with two
threads, which can break an equality, and what `tests/sample.md` says of them with each instruction set, which changes
both sides alike. An instruction set is first tried on products of matrices and vectors over all offsets in a 64-byte
line, and is left out where it changes no bit on this machine.
`--sample` runs a few files, and of those what `tests/sample.md` says, with products rounded by address alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROBE = """
import hashlib, torch
torch.set_num_threads(1)
digest = hashlib.sha256()
for rows, columns in ((37, 53), (64, 64), (10, 64), (128, 784)):
    draws = torch.Generator().manual_seed(rows)
    matrix, images = torch.randn(rows, columns, generator=draws), torch.randn(5, 1, 8, 8, generator=draws)
    vector, filters = torch.randn(columns, generator=draws), torch.randn(4, 1, 3, 3, generator=draws)
    for offset in range(16):
        moved = torch.empty(matrix.numel() + 16)[offset : offset + matrix.numel()].view(rows, columns).copy_(matrix)
        for product in (moved @ vector, moved.T @ moved, torch.nn.functional.linear(vector.expand(5, -1), moved)):
            digest.update(product.numpy().tobytes())
    for result in (torch.conv2d(images, filters), matrix.exp(), matrix.softmax(1), matrix.sum(), matrix.norm()):
        digest.update(result.numpy().tobytes())
print(digest.hexdigest())
"""
INSTRUCTION_SETS = [
    ("ATEN_CPU_CAPABILITY", "default"),
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
    ("MKL_CBWR", "COMPATIBLE"),
    ("MKL_CBWR", "AVX2"),
    ("ONEDNN_MAX_CPU_ISA", "SSE41"),
    ("ONEDNN_MAX_CPU_ISA", "AVX2"),
]
FOLDERS = ["tests/conformance", "tests/equivalence", "tests/simulation", "tests/unit/compression"]
COMPARES_BITS = re.compile(r"torch\.equal|sha256|tobytes")
SAMPLE = [
    "tests/equivalence/test_overlapped_servers.py",
    "tests/equivalence/test_accumulated_gradients.py",
    "tests/equivalence/test_lazy_equivalence.py",
    "tests/unit/compression",
]


def main() -> int:
    """Run every case, and return 1 if one fails."""
    sampled = "--sample" in sys.argv[1:]
    cases: list[tuple[str, dict[str, str], list[str]]] = [
        ("products of vectors rounded by address", {}, ["--round-by-address", "vectors"]),
        # Threads that wait awake take the cores from the tests beside them: the tests take five times as long.
        ("two threads", {"OMP_WAIT_POLICY": "passive"}, ["--compute-threads", "2"]),
    ]
    if sampled:
        del cases[1:]
    else:
        usual = _probed({})
        for name, value in INSTRUCTION_SETS:
            if _probed({name: value}) == usual:
                print(f"{name}={value}: no effect here")
            else:
                cases.append((f"{name}={value}", {name: value}, ["--sample"]))
    failed = []
    for title, variables, options in cases:
        print(f"== {title}", flush=True)
        tests = SAMPLE if sampled else _comparing_bits()
        command = [
            "-m",
            "pytest",
            "-q",
            *(["--sample"] if sampled else []),
            "--numprocesses",
            "auto",
            "--dist",
            "loadfile",
            *tests,
            *options,
        ]
        if subprocess.run([sys.executable, *command], env=os.environ | variables, check=False).returncode:
            failed.append(title)
    print(f"failed: {'; '.join(failed)}" if failed else "the same bits in every case")
    return bool(failed)


def _comparing_bits() -> list[str]:
    files = (file for folder in FOLDERS for file in sorted(Path(folder).glob("**/test_*.py")))
    return [str(file) for file in files if COMPARES_BITS.search(file.read_text(encoding="utf-8"))]


def _probed(variables: dict[str, str]) -> str:
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return run.stdout


if __name__ == "__main__":
    sys.exit(main())
