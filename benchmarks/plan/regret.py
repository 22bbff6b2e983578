"""What `plan` and `--strategy auto` choose, against the best of all candidates: 20 simulated clusters.

    python benchmarks/plan/regret.py [--minutes 40] [--only "thin links"] [--out FILE]
    python benchmarks/plan/regret.py --other-seeds

On each cluster `plan` races at most eight strategies to the target. Every candidate that reached it, and the choice of
`auto`, then trains to the target with three seeds that `plan` has not seen. All of it is in virtual time.

    regret     time of the choice / time of the best - 1, both means over unseen seeds
    beyond     the same where the best is faster by more than its seeds differ (paired t test, 95 %), else 0
    auto       that of `auto` over the best with as many workers, which `auto` does not choose
    coverage   unseen times within the plan's 80 % interval, of all; with the binomial 95 % interval (Wilson)

With `--other-seeds` the same plans are held against three other seeds for each cluster.

The file is written after every plan and every candidate. What it has is not computed again, so several calls of
limited length make the whole; the table is of what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from held_out import FIRST_UNSEEN_SEED, kendall_tau

from polyrhythm.api.plan import plan
from polyrhythm.api.rehearsal import Auto
from polyrhythm.api.simulate import simulate
from polyrhythm.config.recipe import configure
from polyrhythm.evaluation.target import Target
from polyrhythm.launch.devices import available_cores
from polyrhythm.launch.forked import forked
from polyrhythm.reporting.comparison import differ, read_run, time_to
from polyrhythm.simulation.cluster import Cluster, cluster_text, open_cluster

STRATEGIES = (
    "synchronous",
    "parameter_server",
    "local_sgd(steps=4)",
    "local_sgd(steps=16)",
    "easgd",
    "ad_psgd",
    "backup_workers",
    "ssp",
)
TARGET, EPOCHS, TRIALS, SEEDS = "top1=0.88", 20, 12, 3
JOB: dict[str, Any] = {"data": "digits", "model": "mlp", "batch_size": 32}
GOOD = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1.17e8}
THIN = {"latency_s": 5e-4, "bandwidth_bytes_per_s": 1.25e6}
INSIDE = {"latency_s": 2e-5, "bandwidth_bytes_per_s": 4e9}
FAR = {"latency_s": 4e-2, "bandwidth_bytes_per_s": 1.25e7}
EIGHT = [{"name": "host", "count": 8, "cores": 4}]


def cluster(**changed: Any) -> dict[str, Any]:
    """Return a cluster of four hosts of four cores on 1 Gb/s, whose steps take 50 ms."""
    values = {
        "hosts": [{"name": "host", "count": 4, "cores": 4}],
        "nic": GOOD,
        "inside": INSIDE,
        "step_time": "log_normal(median=0.05, sigma=0.1)",
    }
    return {**values, **changed}


def uneven(*speeds: float, **changed: Any) -> dict[str, Any]:
    """Return that cluster with hosts of these speeds."""
    hosts = [
        {"name": f"host{place}", "count": 1, "cores": 4, "speed": speed} for place, speed in enumerate(speeds)
    ]
    return cluster(hosts=hosts, **changed)


def racks(**values: Any) -> dict[str, Any]:
    """Return eight hosts in two racks."""
    return cluster(hosts=EIGHT, racks={"hosts": 4, **values})


CLUSTERS: dict[str, dict[str, Any] | str] = {
    "office": "office",
    "spot": "spot",
    "even": cluster(),
    "even, eight hosts": cluster(hosts=EIGHT),
    "even, steps of 5 ms": cluster(step_time="log_normal(median=0.005, sigma=0.1)"),
    "uneven, 2:1": uneven(1, 1, 1, 0.5),
    "uneven, 5:1": uneven(1, 1, 1, 0.2),
    "uneven, four speeds": uneven(1, 0.8, 0.6, 0.4),
    "uneven, half old": uneven(1, 1, 0.5, 0.5),
    "thin links": cluster(nic=THIN),
    "thin links, eight hosts": cluster(hosts=EIGHT, nic=THIN),
    "thin links, uneven": uneven(1, 1, 0.7, 0.4, nic=THIN),
    "one thin link": cluster(
        hosts=[
            {"name": "host", "count": 3, "cores": 4},
            {"name": "thin", "count": 1, "cores": 4, "nic": THIN},
        ]
    ),
    "high latency": cluster(nic={"latency_s": 1e-2, "bandwidth_bytes_per_s": 1.17e8}),
    "two regions": racks(uplink_bandwidth_bytes_per_s=1.25e6, latency_s=3e-2),
    "oversubscribed racks": racks(oversubscription=8),
    "far host": cluster(
        hosts=[{"name": "host", "count": 3, "cores": 4}, {"name": "far", "count": 1, "cores": 4, "nic": FAR}]
    ),
    "long tails": cluster(step_time="shifted_exponential(shift=0.03, mean=0.03)"),
    "many cores, one host": cluster(hosts=[{"name": "host", "count": 1, "cores": 12, "workers": 8}]),
    "one slow disk": cluster(slow={2: 1.8}),
}


def described(name: str) -> Cluster:
    """Return a cluster by its name here."""
    values = CLUSTERS[name]
    return open_cluster(values) if isinstance(values, str) else Cluster(name=name, **values)


def planned(name: str, file: Path, folder: Path) -> dict[str, Any]:
    """Return what `plan` and `auto` choose on a cluster, and all candidates with their times."""
    hosts = len(described(name).machines)
    workers = sorted({2, min(8, max(4, hosts))})
    began_s = time.monotonic()
    made = plan(
        cluster=file,
        target=TARGET,
        strategies=STRATEGIES,
        workers=workers,
        compressors=(),
        trials=TRIALS,
        seeds=SEEDS,
        epochs=EPOCHS,
        optimize="time",
        out=folder / "plan",
        **JOB,
    )
    candidates = {
        each.candidate.name: {
            "strategy": each.candidate.strategy,
            "workers": each.candidate.workers,
            "options": dict(each.candidate.options),
            "epochs": each.epochs,
            "planned_s": list(each.seconds),
            "rank": each.rank,
        }
        for each in (*made.choices, *made.others)
        if math.isfinite(each.seconds[0])
    }
    chosen = (
        Auto(cluster=str(file))
        .choose(configure({}, {**JOB, "strategy": "synchronous", "workers": workers[-1]}))
        .candidate
    )
    candidates.setdefault(
        chosen.name,
        {
            "strategy": chosen.strategy,
            "workers": chosen.workers,
            "options": {},
            "epochs": 8 * EPOCHS,
            "planned_s": None,
        },
    )
    return {
        "recommended": made.recommended.candidate.name,
        "auto": chosen.name,
        "planning_s": time.monotonic() - began_s,
        "candidates": candidates,
    }


def unseen(file: Path, case: dict[str, Any], folder: Path, first: int) -> list[float]:
    """Return a candidate's times to the target with unseen seeds; infinite where one does not reach it."""

    def seconds(seed: int) -> float:
        out = folder / f"{abs(hash(str(case)))}-{seed}"
        options = {**JOB, **case["options"], "epochs": case["epochs"], "until": TARGET, "seed": seed}
        simulate(cluster=file, strategy=case["strategy"], workers=case["workers"], out=out, **options)
        return time_to(Target.parse(TARGET))(read_run(out))

    seeds = [(first + place,) for place in range(SEEDS)]
    return forked(seconds, seeds, available_cores())


def row(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the figures of a cluster; None before all of it is there."""
    cases = found["candidates"]
    if any("unseen_s" not in case for case in cases.values()):
        return None
    truth = {name: statistics.fmean(case["unseen_s"]) for name, case in cases.items()}
    best = min(truth.values())
    timed = {name: case for name, case in cases.items() if case["planned_s"] is not None}
    bounded = [case for case in timed.values() if math.isfinite(case["planned_s"][1])]
    first = min(truth, key=lambda name: truth[name])
    workers = cases[found["auto"]]["workers"]
    regret = truth[found["recommended"]] / best - 1
    surely = differ(cases[found["recommended"]]["unseen_s"], cases[first]["unseen_s"])
    return {
        "candidates": len(timed),
        "best": first,
        "regret": regret,
        "beyond": regret if surely else 0.0,
        "regret_of_auto": truth[found["auto"]] / best - 1,
        "auto_of_workers": truth[found["auto"]]
        / min(truth[name] for name, case in cases.items() if case["workers"] == workers)
        - 1,
        "time_error": statistics.median(
            abs(case["planned_s"][0] / truth[name] - 1) for name, case in timed.items()
        ),
        "kendall_tau": kendall_tau(
            [case["planned_s"][0] for case in timed.values()], [truth[name] for name in timed], noise=0.1
        ),
        "hits": sum(
            case["planned_s"][1] <= seconds <= case["planned_s"][2]
            for case in bounded
            for seconds in case["unseen_s"]
        ),
        "intervals": SEEDS * len(bounded),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = {name: made for name in CLUSTERS if name in found and (made := row(found[name]))}
    lines = [
        "| cluster | candidates | recommended | best | regret | beyond noise | regret of `auto` | with its workers "
        "| median error | τ | in interval |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each['candidates']} | {found[name]['recommended']} | {each['best']} | {each['regret']:.1%} "
        f"| {each['beyond']:.1%} | {each['regret_of_auto']:.1%} | {each['auto_of_workers']:.1%} "
        f"| {each['time_error']:.1%} | {each['kendall_tau']:.2f} "
        f"| {each['hits']} of {each['intervals']} |"
        for name, each in rows.items()
    ]
    if rows:
        hits, intervals = (sum(each[key] for each in rows.values()) for key in ("hits", "intervals"))

        def summary(key: str) -> str:
            values = sorted(each[key] for each in rows.values())
            ninth = values[math.ceil(0.9 * len(values)) - 1]
            return f"median {statistics.median(values):.1%}, 90th percentile {ninth:.1%}"

        keys = ("regret", "beyond", "regret_of_auto", "auto_of_workers")
        low, high = binomial(hits, intervals)
        lines.append(
            f"| **{len(rows)} clusters** | | | | {' | '.join(map(summary, keys))} "
            f"| median {statistics.median(each['time_error'] for each in rows.values()):.1%} | "
            f"| {hits} of {intervals} ({hits / max(1, intervals):.0%}; {low:.0%} to {high:.0%}) |"
        )
    return "\n".join(lines)


def binomial(hits: int, tries: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    if not tries:
        return 0.0, 1.0
    z, share = 1.959964, hits / tries
    middle = share + z * z / (2 * tries)
    reach = z * math.sqrt(share * (1 - share) / tries + z * z / (4 * tries**2))
    return (middle - reach) / (1 + z * z / tries), (middle + reach) / (1 + z * z / tries)


def main() -> None:
    """Compute what the file lacks, for as long as allowed, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=40.0, help="nothing new is begun after these")
    parser.add_argument(
        "--replan", action="store_true", help="plan again, and keep the times of unseen seeds"
    )
    parser.add_argument(
        "--other-seeds", action="store_true", help="time candidates with seeds of each cluster's own"
    )
    parser.add_argument("--only", action="append", choices=list(CLUSTERS), help="clusters; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("regret.json"))
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.other_seeds:
        given.out = given.out.with_name(f"{given.out.stem}_other_seeds.json")
        if given.out.exists():
            found = json.loads(given.out.read_text())
        else:
            for case in (case for each in found.values() for case in each["candidates"].values()):
                case.pop("unseen_s", None)
    end_s = time.monotonic() + 60 * given.minutes

    def keep() -> None:
        draft = given.out.with_suffix(".draft")
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
        draft.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        draft.replace(given.out)

    for place, name in enumerate(CLUSTERS):
        if given.only and name not in given.only:
            continue
        first = FIRST_UNSEEN_SEED + (SEEDS * (1 + place) if given.other_seeds else 0)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "cluster.yaml"
            file.write_text(cluster_text(described(name)), encoding="utf-8")
            if (name not in found or given.replan) and time.monotonic() < end_s:
                before = found.get(name, {"candidates": {}})["candidates"]
                found[name] = planned(name, file, Path(folder))
                for each, case in found[name]["candidates"].items():
                    known = before.get(each, {})
                    if "unseen_s" in known and known["epochs"] == case["epochs"]:
                        case["unseen_s"] = known["unseen_s"]
                keep()
            for case in found.get(name, {"candidates": {}})["candidates"].values():
                if "unseen_s" not in case and time.monotonic() < end_s:
                    case["unseen_s"] = unseen(file, case, Path(folder), first)
                    keep()
    print(table(found))


if __name__ == "__main__":
    main()
