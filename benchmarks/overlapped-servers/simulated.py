"""Simulated steps of servers of all kinds, with traffic that hides behind computing and without.

    python benchmarks/overlapped-servers/simulated.py [--workers 4] [--compute-s 0.6] [--mbit 1000]

Hosts have one worker each and links of one bandwidth, which pushes, answers and what servers say to each other share.
The model is ResNet-18 with every number there, its buckets and the shares of its layers. Compressing takes no virtual
time. What a step takes beyond its computing is exposed communication.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from measure import IMAGE, dry_run_of, layout_of, simulated_times, typical_s

from polyrhythm.config.model import shapes_of
from polyrhythm.simulation.cluster import Link
from polyrhythm.training.model_sizes import sizes_of

IN_STEP = "consistency=synchronous"
SPECS = [
    f"parameter_server(servers=1, {IN_STEP})",
    f"parameter_server(servers=2, {IN_STEP})",
    f"parameter_server(servers=4, {IN_STEP})",
    f"parameter_server(servers=16, {IN_STEP})",
    f"parameter_server(servers=4, replicas=2, {IN_STEP})",
    "hierarchical(groups=2, servers=1)",
    "hierarchical(groups=2, servers=2)",
    f"parameter_server(servers=4, {IN_STEP}, compress=float16)",
    f"parameter_server(servers=4, {IN_STEP}, compress=int8)",
    f"parameter_server(servers=1, {IN_STEP}, compress=top_k(density=0.01))",
]


def main() -> None:
    """Print a line for each."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--compute-s", type=float, default=0.6)
    options.add_argument("--mbit", type=float, default=1000)
    chosen = options.parse_args()
    sizes = sizes_of(shapes_of("resnet18", 10, IMAGE), IMAGE)
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=chosen.mbit * 1e6 / 8)
    inside = Link(latency_s=1e-5, bandwidth_bytes_per_s=5e9)
    print("| strategy | step, s | overlapped | exposed, s | overlapped |\n|---|---|---|---|---|")
    for spec in SPECS:
        found = []
        for overlap in ("false", "true"):
            text = f"{spec[:-1]}, overlap={overlap})"
            dry_run = replace(dry_run_of(text, sizes, chosen.workers, chosen.steps), exact=False)
            layout = layout_of(dry_run, chosen.compute_s, link, inside)
            found.append(typical_s(simulated_times(layout, dry_run, 1e9)))
        exposed = " | ".join(f"{step_s - chosen.compute_s:.3f}" for step_s in found)
        print(f"| `{spec}` | {found[0]:.3f} | {found[1]:.3f} | {exposed} |", flush=True)


if __name__ == "__main__":
    main()
