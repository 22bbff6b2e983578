"""Runs drawn from a seed: a strategy with options, a cluster, what goes wrong, and when someone wants it to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from conformance.jobs import blobs, make_job, strategy
from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.job import FaultTolerance, Job
from polyrhythm.roles.world import StopRequest
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.injection.fault import Fault, FaultTarget, FaultyRun
from polyrhythm.simulation.layout import Layout, lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.simulation.trials import Trial, drawn_death, faults_of, faults_text, play
from polyrhythm.specs import choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.pipeline.pipeline import Pipeline
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.model_sizes import ModelSizes

STEP_S = 0.01
_COLLECTIVES = [
    "ring",
    "direct",
    "binomial_tree",
    "recursive_doubling",
    "rabenseifner",
    "flat",
    "segmented_chain",
]
_AT_AVERAGE = ["keep", "average", "reset"]
_TOPOLOGIES = ["ring", "complete", "star", "exponential", "one_peer_exponential"]
_FREE_GATES = ["asynchronous", "softsync(n=2)", "backup(spare=1)", "bounded_staleness(s=1)"]
_GATES = [*_FREE_GATES, "synchronous", "bounded_staleness(s=2, cached_reads=True)"]
_MERGES = ["plain", "staleness_aware", "delay_compensated", "delay_compensated(variant=c, lambda0=0.5)"]
_AGGREGATORS = ["weighted_mean", "coordinate_median", "trimmed_mean(k=1)", "krum(f=0)", "multi_krum(f=0)"]
_INSIDE = ["synchronous", "local_sgd(steps=2)", "local_sgd(steps=3, optimizer_state=average)"]

_SERVERS: dict[str, list[Any]] = {"servers": [1, 2, 3], "placement": ["shared", "dedicated"]}
_SERVED = _SERVERS | {"replicas": [1, 2]}
_ROUNDS: dict[str, list[Any]] = {
    "steps": [1, 2, 3, 5],
    "optimizer_state": _AT_AVERAGE,
    "collective": _COLLECTIVES,
}
_ELASTIC = _SERVERS | {"mode": ["asynchronous", "synchronous"], "tau": [1, 2, 3], "alpha": [0.1, 0.5]}

LAYERS = 4
"""Of the network that is trained; more stages there cannot be."""

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "ad_psgd": {"topology": _TOPOLOGIES},
    "admm": _ROUNDS | {"rho": [0.1, 1.0]},
    "backup_workers": _SERVED | {"spare": [0, 1, 2]},
    "bmuf": _ROUNDS | {"nesterov": [False, True], "block_momentum": [0.5]},
    "d_psgd": {"topology": _TOPOLOGIES},
    "dc_asgd": _SERVED | {"variant": ["a", "c"], "m": [0.0, 0.5]},
    "decoupled_diloco": _SERVERS | {"steps": [3, 4], "quorum": [1]},
    "diloco": {"steps": [1, 2, 3], "outer": ["sgd(lr=0.5, momentum=0)", "adam(lr=0.01)"]},
    "downpour": _SERVED
    | {"n_fetch": [1, 2, 3], "n_push": [1, 2, 3], "local_rate": [0.0, 0.5], "warm_start_steps": [3]},
    "eamsgd": _ELASTIC | {"delta": [0.0, 0.5]},
    "easgd": _ELASTIC,
    "gaia": _SERVERS | {"sites": [1, 2, 3], "threshold": [0.0, 0.1], "lag": [0, 1], "barrier": [0.0, 1.0]},
    "hierarchical": _SERVERS | {"groups": [1, 2, 3], "consistency": _GATES},
    "hierarchical_averaging": _ROUNDS | {"group": [2, 3], "steps": [1, 2], "steps_between": [2, 4]},
    "hogwild": {},
    "hybrid": {"scheme": ["a", "b", "c"], "collective": _COLLECTIVES},
    "lazy_synchronous": {"bucket_bytes": [64, 4096], "piece_bytes": [0, 256], "collective": _COLLECTIVES},
    "local_sgd": _ROUNDS,
    "mixed": _SERVERS | {"replicas": [1, 2, 3], "consistency": _GATES, "merge": _MERGES, "inside": _INSIDE},
    "ng_sgd": {"steps": [1, 2, 3], "rank": [0, 2]},
    "parallel_sgd": {"collective": _COLLECTIVES},
    "parameter_server": _SERVED | {"consistency": _GATES, "merge": _MERGES, "aggregator": _AGGREGATORS},
    "periodic_averaging": _SERVERS | {"steps": [1, 2, 3], "share": [0.3]},
    "pipeline": {
        "microbatches": [1, 2, 4, 6],
        "schedule": [
            "gpipe",
            "zero_bubble",
            "interleaved",
            "weight_stashing",
            "weight_stashing(vertical=True)",
            "double_buffered",
        ],
        "replicas": [2],
        "inside": _INSIDE,
        "recompute": [False, True],
    },
    "post_local_sgd": _ROUNDS | {"after": [0, 2, 100]},
    "sandblaster": _SERVERS | {"portions": [1, 2, 3], "memory": [0, 3], "trials": [0, 2], "tolerance": [0.1]},
    "scaffold": _ROUNDS,
    "sgp": {"topology": _TOPOLOGIES, "overlap": [False, True]},
    "slowmo": _ROUNDS | {"slow_momentum": [0.0, 0.8], "base": ["sgp", "d_psgd", "ad_psgd"]},
    "softsync": _SERVED | {"n": [1, 2], "merge": _MERGES},
    "ssp": _SERVED | {"s": [0, 1, 2]},
    "staleness_aware": _SERVED,
    "synchronous": {"bucket_bytes": [64, 4096], "transfer": ["full", "bfloat16"], "collective": _COLLECTIVES},
}
"""For every strategy what its options may be; of each a draw takes one value, or none and so the default."""


def wish(at_s: float, stop: StopRequest) -> Fault:
    """Makes what asks a run to stop at a virtual time, where faults may happen."""

    class Wish(Fault):
        """Nothing goes wrong, but someone wants the run to stop."""

        def check(self, ground: FaultTarget) -> None:
            """There is nothing to refuse."""

        def begin(self, run: FaultyRun, random: Random) -> None:
            """Plans the wish."""
            run.time.at(at_s, stop.request)

    return Wish()


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One run.

    Attributes:
        seed: that it was drawn from.
        spec: of its strategy.
        workers: how many.
        steps: that each takes, where nobody wants to stop.
        cluster: its hosts and links, and how long steps take.
        faults: what goes wrong.
        fatal: whether a rank may be killed that the run needs.
        stop_s: virtual seconds after which someone wants it to stop; None: nobody does.
        learning: what training has beside a strategy.
    """

    seed: int
    spec: str
    workers: int
    steps: int
    cluster: Cluster
    faults: tuple[Fault, ...]
    fatal: bool
    stop_s: float | None
    learning: dict[str, Any]

    def __str__(self) -> str:
        """Tells what is needed to play it again."""
        told = f"{self.spec}, {self.workers} workers, {self.learning}, stop {self.stop_s}"
        return f"{self.seed}: {told}, faults {faults_text(self.faults)!r}"

    @property
    def strategy(self) -> Strategy:
        """Its strategy."""
        return strategy(self.spec)

    @property
    def layout(self) -> Layout:
        """Where its ranks run."""
        return lay_out(
            self.cluster,
            self.workers,
            self.strategy.traits(self.workers).servers,
            self.strategy.traits(self.workers).placement,
        )

    def faults_and_wish(self, stop: StopRequest) -> tuple[Fault, ...]:
        return self.faults if self.stop_s is None else (*self.faults, wish(self.stop_s, stop))

    def work_dry(self, emit: Callable[[Event], None]) -> None:
        """Plays it with exact gradients, watched by what its strategy declares to hold."""
        stop = StopRequest()
        dry_run = DryRun(
            strategy=self.strategy, workers=self.workers, steps=self.steps, sizes=sizes_of(self.strategy)
        )
        trial = Trial(layout=self.layout, dry_run=dry_run, faults=self.faults_and_wish(stop))
        play(trial, self.seed, emit, stop=stop)

    def train(self, emit: Callable[[Event], None], folder: Path | None = None, **keeping: Any) -> None:
        """Plays it with real gradients."""
        stop = StopRequest()
        where = self.cluster.model_copy(update={"faults": self.faults_and_wish(stop)})
        simulate_on(replace(self.layout, cluster=where), self.job(folder, **keeping), emit, stop=stop)

    def job(self, folder: Path | None = None, **keeping: Any) -> Job:
        """Gives what it trains, in batches of four, of which the last of an epoch may be smaller or empty."""
        learning = dict(self.learning)
        images = learning.pop("images")
        losses = FaultTolerance(rescale=learning.pop("rescale"), restarts=99)
        job = make_job(self.spec, self.workers, dataset=blobs(images, 8), folder=folder, **learning)
        return replace(job, fault_tolerance=losses, checkpointing=replace(job.checkpointing, **keeping))


def sizes_of(chosen: Strategy) -> ModelSizes:
    """Gives those of the model that is run dry: a small one where pieces are small, of which it had 1,600 else."""
    scale = 1 if getattr(chosen, "piece_bytes", 0) else 100
    return ModelSizes((300 * scale, 300 * scale, 400 * scale), (0.3, 0.3, 0.4))


def drawn(seed: int, *, only: str | None = None) -> Drawn:
    """Draws a run that its strategy allows.

    Args:
        seed: of everything.
        only: the strategy's name; None draws one.
    """
    random = Random(seed_for("drawn run", seed))
    names = sorted(name for family in FAMILIES for name in choices(family))
    while True:
        name = only or names[seed % len(names)]
        spec = _spec(name, random)
        workers = random.choice([1, 2, 3, 3, 4, 4, 5, 6])
        try:
            chosen = strategy(spec)
            chosen.check(workers)
            if isinstance(chosen, Pipeline) and chosen.ranks(workers) * chosen.schedule.chunks > LAYERS:
                continue
            return _run(seed, spec, workers, random)
        except RequestError:
            continue


def _spec(name: str, random: Random) -> str:
    taken = {key: random.choice(values) for key, values in OPTIONS[name].items() if random.random() < 0.5}
    return f"{name}({', '.join(f'{key}={value}' for key, value in taken.items())})" if taken else name


def _run(seed: int, spec: str, workers: int, random: Random) -> Drawn:
    chosen, steps = strategy(spec), random.randint(4, 9)
    where = _cluster(chosen, workers, random)
    layout = lay_out(where, workers, chosen.traits(workers).servers, chosen.traits(workers).placement)
    dry_run = DryRun(strategy=chosen, workers=workers, steps=steps, sizes=sizes_of(chosen))
    faults = faults_of(Trial(layout=layout, dry_run=dry_run), seed) if random.random() < 0.8 else ()
    policy = chosen.faults(workers)
    needed = [rank for rank in range(layout.roles.size) if not policy.survives(rank, layout.roles)]
    fatal = bool(needed) and random.random() < 0.1
    if fatal:
        faults = (*faults, drawn_death(needed, seed, steps * STEP_S))
    stop_s = round(random.uniform(0, 1.5 * steps * STEP_S), 5) if random.random() < 0.3 else None
    return Drawn(
        seed=seed,
        spec=spec,
        workers=workers,
        steps=steps,
        cluster=where,
        faults=faults,
        fatal=fatal,
        stop_s=stop_s,
        learning=_learning(chosen, workers, steps, random),
    )


def _cluster(chosen: Strategy, workers: int, random: Random) -> Cluster:
    links = {
        "latency_s": random.choice([0.0, 1e-4, 3e-3]),
        "bandwidth_bytes_per_s": random.choice([1e7, 1.2e8, 1e30]),
    }
    inside = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    each = workers if chosen.traits(1).one_host else random.choice([1, 1, 2])
    kind = {"name": "host", "count": workers + 4, "cores": 8, "workers": each}
    step_time = random.choice([f"constant(seconds={STEP_S})", f"exponential(mean={STEP_S})"])
    slow = {random.randrange(workers): random.choice([1.5, 4])} if random.random() < 0.3 else {}
    return Cluster(name="drawn", hosts=[kind], nic=links, inside=inside, step_time=step_time, slow=slow)


def _learning(chosen: Strategy, workers: int, steps: int, random: Random) -> dict[str, Any]:
    """Draws two epochs that come to about so many steps."""
    plain, others = "sgd(lr=0.05, momentum=0)", ["sgd(lr=0.05)", "adam(lr=0.01)"]
    epoch = workers * 4 * max(1, steps // 2)
    return {
        "images": max(1, epoch - random.choice([0, 0, 1, 5, 4 * workers - 1])),
        "optimizer": plain if chosen.name == "eamsgd" else random.choice([plain, *others]),
        "schedule": random.choice(["cosine", "constant"]),
        "rescale": random.random() < 0.3,
    }
