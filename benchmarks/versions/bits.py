"""Are the bits of this version those of an earlier one? Simulated runs of both on one machine, healthy and with losses.

    git worktree add ../before COMMIT
    python benchmarks/versions/bits.py ../before [--seeds 3] [--losses 10] [--balance measured] [--only NAME …]

Each version runs the same cases in a process of its own, with one thread: strategies, 2 and 3 workers, two optimizers,
seeds, and drawn deaths with and without successors. A row has the number of runs whose `parameters_sha256` are equal,
and of those whose figures are (images not seen, workers, bytes, virtual time).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

CASES = {
    "synchronous": "synchronous",
    "buckets": "synchronous(bucket_bytes=512)",
    "ring": "synchronous(collective=ring)",
    "bfloat16": "synchronous(transfer=bfloat16)",
    "top_k": "synchronous(compress=top_k(density=0.05))",
    "power_sgd": "synchronous(compress=power_sgd(rank=2))",
    "one_bit": "synchronous(compress=one_bit)",
    "lazy": "lazy_synchronous",
    "local_sgd": "local_sgd(steps=4)",
    "averaged": "local_sgd(steps=4, optimizer_state=average)",
    "movements": "local_sgd(steps=4, compress=top_k(density=0.05))",
    "every_step": "local_sgd(steps=1)",
    "diloco": "diloco(steps=4)",
    "streaming": "diloco(steps=4, fragments=2, delay=1, mixing=0.5)",
    "late": "diloco(steps=4, delay=3)",
    "streaming_int8": "diloco(steps=4, fragments=2, delay=1, compress=int8)",
    "bmuf": "bmuf(steps=4)",
    "slowmo": "slowmo(steps=4)",
    "ng_sgd": "ng_sgd(steps=4)",
    "parallel_sgd": "parallel_sgd",
    "hierarchical": "hierarchical_averaging(group=2, steps=2, steps_between=4)",
    "post_local_sgd": "post_local_sgd(after=4, steps=4)",
    "sgp": "sgp",
    "overlapped_sgp": "sgp(overlap=True)",
    "d_psgd": "d_psgd",
    "choco": "d_psgd(compress=top_k(density=0.05))",
    "slowmo_sgp": "slowmo(steps=4, base=sgp)",
    "mixed": "mixed(replicas=2)",
    "mixed_ring": "mixed(replicas=2, servers=2, inside=synchronous(collective=ring))",
    "mixed_rounds": "mixed(replicas=2, servers=2, inside=local_sgd(steps=3))",
    "mixed_in_step": "mixed(replicas=2, consistency=synchronous, inside=local_sgd(steps=3, optimizer_state=average))",
}
OPTIMIZERS = ("sgd(lr=0.05, momentum=0.9)", "adam(lr=0.002)")


def cases(names: list[str], seeds: int, losses: int, balance: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case: its name, and the arguments of `polyrhythm.simulate`."""
    common = {"cluster": "office", "data": "digits", "model": "mlp", "balance": balance}
    for name in names:
        for workers in (2, 3):
            for optimizer in OPTIMIZERS:
                for seed in range(seeds):
                    more = {"workers": workers, "optimizer": optimizer, "seed": seed, "epochs": 2}
                    yield name, {**common, **more, "strategy": CASES[name]}
        for seed in range(losses):
            yield name, {**common, "workers": 3, "epochs": 3, "strategy": CASES[name], "faults": deaths(seed)}


def deaths(seed: int) -> str:
    """Return one or two deaths, most of them with a successor."""
    drawn = Random(seed)
    found = []
    for rank in drawn.sample(range(3), drawn.choice([1, 2])):
        alone = drawn.random() < 0.2 and rank > 0
        restart = "" if alone else f", restart_after_s={drawn.choice([0.0, 0.05])}"
        found.append(f"kill(rank={rank}, at_s={drawn.uniform(0.05, 1.2):.4f}{restart})")
    return "; ".join(found)


def play(asked: list[tuple[str, dict[str, Any]]]) -> None:
    """Run the cases with the code of this process, and print a line of JSON for each."""
    import torch

    import polyrhythm
    from polyrhythm.errors import RunError

    torch.set_num_threads(1)
    for name, options in asked:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = polyrhythm.simulate(out=Path(folder) / "run", **options).figures
            except RunError as error:
                found = {"ends": str(error)[:200]}
        keys = ("ends", "images_not_seen", "workers_lost", "workers_joined", "bytes_sent_per_step", "seconds")
        figures = {key: found.get(key) for key in keys}
        if "faults" in options and found.get("seconds"):  # messages of a recovery have other lengths
            figures["seconds"] = round(found["seconds"], 2)
        print(json.dumps([name, "faults" in options, figures, found.get("parameters_sha256")]), flush=True)


def rows_of(tree: Path, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--play"]
    done = subprocess.run(
        command, input=json.dumps(asked), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def main() -> None:
    if sys.argv[1:] == ["--play"]:
        play(json.load(sys.stdin))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="worktree of the version before")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--balance", default="off")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    asked = parser.parse_args()
    differ = 0
    for name in asked.only:
        wanted = list(cases([name], asked.seeds, asked.losses, asked.balance))
        pairs = list(zip(*(rows_of(tree, wanted) for tree in (asked.before, Path.cwd())), strict=True))
        for faulty, said in ((False, "healthy"), (True, "with losses")):
            some = [(old, new) for old, new in pairs if old[1] is faulty]
            figures = sum(old[2] == new[2] for old, new in some)
            bits = sum(old[3] == new[3] and old[3] is not None for old, new in some)
            differ += 0 if faulty else len(some) - bits
            print(f"{name} {said}: bits {bits} of {len(some)}, figures {figures} of {len(some)}", flush=True)
            for (_, options), (old, new) in zip(wanted, pairs, strict=True):
                if old[1] is faulty and old[2:] != new[2:]:
                    print(f"  {options}\n    before {old[2:]}\n    now    {new[2:]}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
