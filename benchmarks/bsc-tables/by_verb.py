"""Tables 1 and 2 of Campos et al., ICCS 2017, by `polyrhythm simulate`, with speed-up and efficiency.

    python benchmarks/bsc-tables/by_verb.py [--steps 100] [--out benchmarks/bsc-tables]

Each row is one command, printed with it: ResNet-50 of 1,200 classes, a node as one worker with a batch of 128 (`bsc`),
or each of its four GPUs as one with a batch of 32, in groups of a node (`bsc_gpus`, mixed(replicas=4)). The speed-up is
over one node, and the efficiency is the speed-up over the nodes. Rates are those while all were at work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from polyrhythm.api.simulate import simulate

PAPER = {
    (1, 0, False): 124.18,
    (2, 1, False): 195.60,
    (4, 1, False): 292.22,
    (4, 3, False): 374.73,
    (4, 3, True): 396.62,
    (8, 7, False): 809.10,
}
"""Images a second, by workers' nodes, servers, and whether these have nodes of their own; 4 with 3 were also 383.09."""
COMMON = {
    "gradients": "none",
    "data": "synthetic(classes=1200, size=224)",
    "model": "resnet50",
}


def options_of(nodes: int, servers: int, replicas: int, *, dedicated: bool = False) -> dict[str, Any]:
    """Returns the options of a row whose nodes have so many workers each."""
    placement = ", placement=dedicated" if dedicated else ""
    strategy = f"mixed(replicas={replicas}, servers={servers}{placement})" if servers else "synchronous"
    cluster, batch_size = ("bsc", 128) if replicas == 1 else ("bsc_gpus", 128 // replicas)
    return COMMON | {
        "cluster": cluster,
        "strategy": strategy,
        "workers": nodes * replicas,
        "batch_size": batch_size,
    }


def command_of(options: dict[str, Any], steps: int) -> str:
    """Returns a row's command."""
    words = [f"--{key.replace('_', '-')} {value!r}" for key, value in options.items()]
    return f"polyrhythm simulate {' '.join(words)} --steps {steps}"


def images_per_s(options: dict[str, Any], steps: int) -> float:
    """Returns the rate of a row while all were at work."""
    with tempfile.TemporaryDirectory() as folder:
        figures = simulate(**options, steps=steps, out=Path(folder) / "run").figures
    return float(figures["sustained_images_per_s"])


HEAD = (
    "| nodes | workers | servers | paper, images/s | speed-up | efficiency "
    "| a worker a node | error | speed-up | efficiency "
    "| 4 GPUs a node | error | speed-up | efficiency |\n" + "|---" * 14 + "|"
)


def cells(rate: float, alone: float, nodes: int, told: float | None) -> list[str]:
    """Returns a rate, how far it is from what the paper has, and what it is worth."""
    error = [] if told is None else [f"{100 * (rate / told - 1):+.1f} %"]
    return [f"{rate:.1f}", *error, f"{rate / alone:.2f}", f"{100 * rate / alone / nodes:.0f} %"]


def main() -> None:
    """Simulates all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    rows, lines, alone = [], [HEAD], {}
    for (workers, servers, dedicated), told in PAPER.items():
        nodes = workers + servers * dedicated
        row: dict[str, Any] = {"nodes": nodes, "workers": workers, "servers": servers, "paper": told}
        line = [str(nodes), str(workers), str(servers), *cells(told, PAPER[1, 0, False], nodes, None)]
        for replicas in (1, 4):
            options = options_of(workers, servers, replicas, dedicated=dedicated)
            rate = images_per_s(options, chosen.steps)
            alone.setdefault(replicas, rate)
            row[f"replicas={replicas}"] = {
                "images_per_s": rate,
                "speedup": rate / alone[replicas],
                "efficiency": rate / alone[replicas] / nodes,
                "command": command_of(options, chosen.steps),
            }
            line += cells(rate, alone[replicas], nodes, told)
            print(row[f"replicas={replicas}"]["command"], f"{rate:.1f} images/s", sep="\n    ", flush=True)
        rows.append(row)
        lines.append(f"| {' | '.join(line)} |")
    print("", *lines, sep="\n")
    if chosen.out is not None:
        (chosen.out / "by_verb.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (chosen.out / "by_verb.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
