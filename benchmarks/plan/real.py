"""Plans held against real training, on hosts that exist: network namespaces with shaped links, a process a rank.

    python benchmarks/plan/real.py [--target top1=0.88] [--seeds 2] [--settings 0 2] [--out FILE]     root, iproute2

Ranks train with real gradients over real links, and sleep what a step computes: 20 ms on average, more on slow hosts,
as drawn from their seed. So two cores are enough for four hosts, and nothing but the network and the strategy is timed.
Told to `plan` are the hosts' speeds, one link between two hosts, one inside a host and the time of a step of one worker
alone, all measured first. Its trials are simulated, with other seeds than the real runs have. Afterwards every case is
simulated with the seeds of its real runs, which tells what of a miss is the simulator's, and what the other seeds'.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "simulator-fidelity"))

from held_out import EPOCHS, FIRST_UNSEEN_SEED, summary
from held_out import JOB as ITS_JOB
from links import link_to_next

from namespaces import Host, shaped_hosts
from polyrhythm.api.plan import plan
from polyrhythm.api.simulate import laid_out, simulate
from polyrhythm.communication.communicator import Communicator
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.evaluation.target import Target
from polyrhythm.events import Evaluated, Event, RunEnded, RunStarted, WorkerProgress
from polyrhythm.reporting.comparison import images_to, read_run, throughput, time_to
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.summary import summarized
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.world import DrawnPace, World
from polyrhythm.simulation.cluster import Cluster, HostKind, Link, cluster_text
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.run import run_rank
from polyrhythm.simulation.simulated_run import step_times
from polyrhythm.simulation.step_times.normal import Normal
from ranks import RanksFailed, on_hosts

JOB = {**ITS_JOB, "keep_checkpoints": 0, "balance": "auto"}
"""In trials and in real runs alike: what workers hand in for a checkpoint of every epoch takes a good part of its time
on links of 10 Mb/s, where an epoch is 11 steps."""
STRATEGIES = ("synchronous", "parameter_server(servers=1)", "local_sgd(steps=4)", "easgd")
WORKERS = (2, 4)
MOST_EPOCHS, LINK_BYTES = 60, 40_000
STEP = Normal(mean=0.02, deviation=0.004)
"""What a rank sleeps for a step, on a host of speed 1."""


@dataclass(frozen=True)
class Setting:
    """Hosts and the links between them.

    Attributes:
        name: of it.
        speeds: of the hosts.
        bits_per_s: of every host's link, in each direction.
    """

    name: str
    speeds: tuple[float, ...]
    bits_per_s: float


SETTINGS = (
    Setting("even hosts, 100 Mb/s", (1.0, 1.0, 1.0, 1.0), 100e6),
    Setting("uneven hosts, 10 Mb/s", (1.0, 1.0, 0.8, 0.5), 10e6),
    Setting("even hosts, 10 Mb/s", (1.0, 1.0, 1.0, 1.0), 10e6),
    Setting("uneven hosts, 100 Mb/s", (1.0, 1.0, 0.8, 0.5), 100e6),
)


def described(setting: Setting, between: Link, inside: Link, overhead_s: float) -> Cluster:
    """Return the cluster of a setting."""
    hosts = tuple(
        HostKind(name=f"h{number}", count=1, cores=4, workers=1, speed=speed, server_takes=0.0)
        for number, speed in enumerate(setting.speeds)
    )
    step = Normal(mean=STEP.mean + overhead_s, deviation=STEP.deviation)
    return Cluster(name="namespaces", hosts=hosts, nic=between, inside=inside, step_time=step)


def train(job: Job, layout: Layout, hosts: Sequence[Host]) -> list[Event]:
    """Train for real; return the leader's events."""
    return on_hosts([hosts[host] for host in layout.host_of], partial(_rank, job, layout))[0]


def _rank(job: Job, layout: Layout, network: Communicator) -> list[Event]:
    events: list[Event] = []
    pace = None
    if layout.roles.works(network.rank):
        pace = DrawnPace(network.clock, step_times(layout, network.clock, job.learning.seed, network.rank))
    run_rank(job, World(network, layout.roles, pace, emit=events.append))
    kept = (Evaluated, RunEnded, RunStarted, WorkerProgress)
    return [event for event in events if isinstance(event, kept)] if network.rank == 0 else []


def job_of(strategy: str, workers: int, seed: int, **options: Any) -> Job:
    """Return the job of a case."""
    told = {**JOB, "strategy": strategy, "workers": workers, "seed": seed, "schedule": "constant", **options}
    return assemble(configure({}, told), CheckpointConfig(checkpoints=0))


def calibrated(setting: Setting, hosts: Sequence[Host]) -> Cluster:
    """Measure one link between hosts, one inside a host, and a worker alone."""
    pairs = ((hosts[0], hosts[1]), (hosts[0], hosts[0]))
    measured = [on_hosts(pair, lambda network: link_to_next(network, LINK_BYTES))[0] for pair in pairs]
    between, inside = (Link(**asdict(link)) for link in measured)
    where = described(setting, between, inside, 0.0)
    alone = job_of("synchronous", 1, 0, epochs=3)
    figures = RunFigures()
    for event in train(alone, laid_out(where, alone), hosts):
        figures.add(event)
    assert figures.together is not None
    total = figures.together.total
    overhead_s = total.seconds / total.steps - STEP.mean
    return described(setting, between, inside, max(0.0, overhead_s))


def held(setting: Setting, target: str, seeds: int, folder: Path) -> dict[str, Any]:
    """Plan on a setting, train every choice for real to the target, and return both."""
    goal = Target.parse(target)
    with shaped_hosts(len(setting.speeds), setting.bits_per_s) as hosts:
        where = calibrated(setting, hosts)
        folder.mkdir()
        (folder / "cluster.yaml").write_text(cluster_text(where), encoding="utf-8")
        planned = plan(
            cluster=folder / "cluster.yaml",
            target=target,
            strategies=STRATEGIES,
            workers=WORKERS,
            trials=len(STRATEGIES) * len(WORKERS),
            seeds=seeds,
            epochs=EPOCHS,
            trial_epochs=MOST_EPOCHS,
            compressors="none",
            out=folder / "plan",
            **JOB,
        )
        cases = []
        # of the clock that hosts really have: what ranks sleep is drawn without the overhead, which is theirs anyway
        plain = described(setting, where.nic, where.inside, 0.0)
        for each in (*planned.choices, *planned.others):
            candidate, happened = each.candidate, []
            length = each.epochs if each.reached else MOST_EPOCHS
            for seed in range(FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + seeds):
                job = job_of(candidate.strategy, candidate.workers, seed, epochs=length, until=target)
                try:
                    happened += reached_by(train(job, laid_out(plain, job), hosts), goal)
                except RanksFailed as error:
                    print(f"{candidate.name}, seed {seed}: {error}", file=sys.stderr)
            if len(happened) < seeds:
                told = f"{len(happened)} of {seeds} reached {target}"
                print(f"{candidate.name}: {told}: left out", file=sys.stderr)
                continue
            seconds, images, rates = zip(*happened, strict=True)
            cases.append(
                {
                    "case": candidate.name,
                    "strategy": candidate.strategy,
                    "workers": candidate.workers,
                    "trials_that_reached_it": each.reached,
                    "predicted_images_per_s": candidate.images_per_s,
                    "images_per_s": statistics.fmean(rates),
                    "predicted_images": each.images[0] if each.images[0] < 1e9 else None,
                    "images": statistics.fmean(images),
                    "predicted_s": each.seconds[0] if each.seconds[0] < 1e9 else None,
                    "low_s": each.seconds[1] if each.seconds[1] < 1e9 else None,
                    "high_s": each.seconds[2] if each.seconds[2] < 1e9 else None,
                    "seconds": statistics.fmean(seconds),
                    "of_each_s": seconds,
                }
            )
            print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    for case in cases:  # nothing of this is timed, nor does it count as predicted
        found = [
            replayed(where, case, seed, target, folder)
            for seed in range(FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + seeds)
        ]
        names = ("simulated_s", "simulated_images", "simulated_images_per_s")
        case |= {
            name: statistics.fmean(every) for name, every in zip(names, zip(*found, strict=True), strict=True)
        }
    same_seeds = [
        {**case, "predicted_s": case["simulated_s"], "predicted_images_per_s": case["simulated_images_per_s"]}
        for case in cases
    ]
    told = {
        "setting": setting.name,
        "target": target,
        "seeds": seeds,
        "cluster": where.model_dump(mode="json"),
        "cases": cases,
    }
    return {**told, **summary(cases), "simulator_with_the_same_seeds": summary(same_seeds)}


def reached_by(events: Sequence[Event], goal: Target) -> list[tuple[float, float, float]]:
    """Return seconds and images to the target, and images a second of the run; nothing if it never got there."""
    _, run = summarized(events)
    assert run is not None, "it has started"
    for test in run.tests:
        event = test.event
        if goal.reached(loss=event.test_loss, top1=event.test_top1, top5=event.test_top5):
            return [(event.time_s, float(test.images), float(run.known["images_per_s"]))]
    return []


def replayed(
    where: Cluster, case: dict[str, Any], seed: int, target: str, folder: Path
) -> tuple[float, float, float]:
    """Return seconds and images to the target and images a second as the simulator has them with a real run's seed."""
    out = folder / f"{case['case']}, seed {seed}".replace("/", "-")
    told = {key: case[key] for key in ("strategy", "workers")}
    simulate(
        cluster=where,
        seed=seed,
        epochs=MOST_EPOCHS,
        schedule="constant",
        until=target,
        out=out,
        **told,
        **JOB,
    )
    run, goal = read_run(out), Target.parse(target)
    return time_to(goal)(run), images_to(goal)(run), throughput(run)


def main() -> None:
    """Run both settings and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="top1=0.88")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--settings",
        type=int,
        nargs="*",
        choices=range(len(SETTINGS)),
        default=range(len(SETTINGS)),
        help="which of them, from 0; what FILE has of the others is kept",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "real.json")
    chosen = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            held(SETTINGS[number], chosen.target, chosen.seeds, Path(folder) / str(number))
            for number in chosen.settings
        ]
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "minutes": (time.monotonic() - began_s) / 60,
    }
    before = json.loads(chosen.out.read_text(encoding="utf-8"))["settings"] if chosen.out.is_file() else []
    measured = {each["setting"] for each in found}
    kept = [each for each in before if each["setting"] not in measured]
    chosen.out.write_text(
        json.dumps({"machine": machine, "settings": [*found, *kept]}, indent=1) + "\n", encoding="utf-8"
    )
    for each in found:
        print(json.dumps({key: value for key, value in each.items() if key != "cases"}))


if __name__ == "__main__":
    main()
