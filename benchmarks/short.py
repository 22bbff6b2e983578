"""Runs every short benchmark, one after the other, and writes what they print to `RESULTS.md`.

    python benchmarks/short.py [--only loop all-reduce] [--out benchmarks/RESULTS.md]

Each is a command that a reader can run alone; peer and ours take turns inside it, so its ratios come from one run.
The page is written after every benchmark, whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
GIVE_UP_S = 600.0


@dataclass(frozen=True)
class Benchmark:
    """One command.

    Attributes:
        title: what it measures.
        words: the script, from this folder on, and its options.
    """

    title: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder of the script."""
        return Path(self.words[0]).parts[0]

    @property
    def command(self) -> str:
        """As one types it."""
        return shlex.join(("python", f"benchmarks/{self.words[0]}", *self.words[1:]))


BENCHMARKS = (
    Benchmark("The training loop against a bare torch loop: `lenet5`", ("loop/measure.py",)),
    Benchmark(
        "The training loop against a bare torch loop: `mlp`",
        ("loop/measure.py", "--model", "mlp", "--data", "digits", "--steps", "20", "--rounds", "101"),
    ),
    Benchmark("All-reduce inside a host against gloo", ("all-reduce/measure.py",)),
    Benchmark(
        "Steps of two workers against the step alone, and against DDP", ("step-efficiency/measure.py",)
    ),
    Benchmark("Push and pull against a Ray actor and gloo", ("push-pull/measure.py",)),
    Benchmark("Reading the data: `lenet5`", ("input-pipeline/measure.py",)),
    Benchmark(
        "Reading the data: `mlp`",
        ("input-pipeline/measure.py", "--model", "mlp", "--steps", "200", "--rounds", "21"),
    ),
    Benchmark("Folders of pictures, decoded once", ("input-pipeline/folders.py",)),
    Benchmark("Other forms of the network: `lenet5`", ("execution/measure.py", "--models", "lenet5")),
    Benchmark(
        "Two workers on two cores, and eight",
        ("step-efficiency/measure.py", "--models", "mlp", "lenet5", "--workers", "2", "8", "--rounds", "7"),
    ),
    Benchmark("From the start of a process to the first step", ("start-up/measure.py",)),
    Benchmark(
        "A thousand simulated ranks, without gradients",
        ("simulator-speed/measure.py", "--workers", "100", "1000", "--servers", "1", "--steps", "20"),
    ),
)


def run(benchmark: Benchmark) -> str:
    """Runs a benchmark; gives what it printed, or why there is nothing."""
    start = time.perf_counter()
    script, *options = benchmark.words
    command = [sys.executable, str(HERE / script), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            told, complaints = running.communicate(timeout=GIVE_UP_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # its ranks too: they would disturb the next one
            return f"not ended after {GIVE_UP_S:.0f} s"
    if running.returncode:
        return f"failed: {(complaints.strip().splitlines() or ['no word'])[-1]}"
    return f"{told.rstrip()}\n({time.perf_counter() - start:.0f} s in all)"


def page(outcomes: list[tuple[Benchmark, str]], load_before: float | None) -> str:
    """Return the Markdown page.

    Args:
        outcomes: what each has printed.
        load_before: how many processes wanted a core when the first one began; None where the system does not say.
    """
    machine = f"{os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}, PyTorch {version('torch')}"
    sections = [
        f"## {benchmark.title}\n\n```\n$ {benchmark.command}\n{outcome}\n```\n"
        for benchmark, outcome in outcomes
    ]
    load = "what else runs is not known" if load_before is None else f"load {load_before:.1f} when it began"
    head = f"# Results of the short benchmarks\n\nWritten by `make bench`. {machine}, {load}.\n"
    return "\n".join([head, *sections])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--only", nargs="+", choices=sorted({each.name for each in BENCHMARKS}))
    options.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    chosen = options.parse_args()
    outcomes = []
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for benchmark in BENCHMARKS:
        if chosen.only and benchmark.name not in chosen.only:
            continue
        print(f"{benchmark.title}: {benchmark.command}", flush=True)
        outcomes.append((benchmark, run(benchmark)))
        print(outcomes[-1][1], flush=True)
        part = chosen.out.with_suffix(".part")
        part.write_text(page(outcomes, load_before))
        part.replace(chosen.out)
    print(f"written to {chosen.out}")


if __name__ == "__main__":
    main()
