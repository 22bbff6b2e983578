"""What balance costs where there is nothing to balance: even machines, with and without it.

    python benchmarks/uneven/even.py

Simulated, four workers on 1 Gb/s, ResNet-18 with batches of 64 that take 0.2 s, 400 steps; once with steps that take
equally long, and once with a spread of 5 %. A server takes nothing from the worker beside it, which would be slower
than the others. Seconds of virtual time, and by what share a run with `--balance measured` is longer.
"""

from __future__ import annotations

from drawn import simulated

EVEN = """
name: even
hosts:
  - {name: host, count: 4, cores: 8, server_takes: 0}
nic: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e8}
inside: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e9}
step_time: STEP_TIME
"""
TIMES = {"constant": "constant(seconds=0.2)", "spread of 5 %": "log_normal(mean=0.2, sigma=0.05)"}
STRATEGIES = (
    "synchronous",
    "lazy_synchronous",
    "parameter_server(consistency=synchronous)",
    "local_sgd(steps=8)",
    "ssp",
    "mixed(replicas=2)",
)


def main() -> None:
    """Runs all pairs."""
    print("| strategy | steps | `off` | `measured` | longer by |\n|---|---|---|---|---|")
    for strategy in STRATEGIES:
        for name, step_time in TIMES.items():
            off, measured = (
                simulated(
                    EVEN.replace("STEP_TIME", step_time),
                    strategy=strategy,
                    balance=balance,
                    gradients="none",
                    model="resnet18",
                    data="synthetic",
                    workers=4,
                    batch_size=64,
                    steps=400,
                )["seconds"]
                for balance in ("off", "measured")
            )
            longer = 100 * (measured / off - 1)
            print(f"| `{strategy}` | {name} | {off:.2f} s | {measured:.2f} s | {longer:+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
