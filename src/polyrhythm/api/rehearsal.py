"""Dry runs in virtual time: images per second of each way of running a job on a cluster.

Shared by `plan`, `why` and `train --strategy auto`. The latter chooses the strategy of a run at its start:

    this machine    link inside it and a few steps of the network, measured ─▶ a cluster of one host
    or a cluster    auto(cluster=C.yaml)
    candidates      the strategies that most often win, with servers in every number and place, in simulation
    choice          the fastest that computes as one large batch, unless another has more images a second by a factor of
    stale updates       margin
    averaged models     1 + (margin - 1) / 5

Cost in images of stale and averaged updates is not known before training: `polyrhythm plan` trains in simulation to
find that out, while a dry run takes a fraction of a second. Averaging at the learning rate of synchronous training
(`local_sgd`, `ad_psgd`) costs less: after the first epoch of `benchmarks/first-epoch`, its test loss is 0.005 to 0.010
above that of synchronous training, and 0.02 to 0.07 with servers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from polyrhythm.api.profile import step_of
from polyrhythm.api.simulate import laid_out, paced_for, with_stages_settled
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import assemble, opened, strategy_from
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError, unknown
from polyrhythm.events import Event
from polyrhythm.launch.devices import computing_with
from polyrhythm.models.architectures.sizes import is_sizes
from polyrhythm.planning.link import measure_inside
from polyrhythm.planning.profile import Profile, measure_host
from polyrhythm.planning.step import profile_step
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import COMPUTING, held_back
from polyrhythm.reporting.pages.report import PREDICTION_FILE
from polyrhythm.reporting.quantities import counted, whole
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.cluster import Cluster, open_cluster
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.specs import Spec, parse

STRATEGIES = (
    "synchronous",
    "parameter_server",
    "dc_asgd",
    "ssp",
    "backup_workers",
    "mixed",
    "local_sgd(steps=4)",
    "local_sgd(steps=16)",
    "easgd",
    "ad_psgd",
)
"""Strategies of every family that win most often."""
_STEPS, _ROUNDS, _MOST_STEPS = 40, 4, 400
_MOST_SERVERS = 8
AUTO = "auto"
"""Strategy name for a choice by dry runs."""
_MEASURED_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the job.

    Attributes:
        strategy: spec of the strategy, servers and placement included.
        family: spec without these; candidates with the same family, workers and options learn alike.
        workers: number of workers.
        options: batch size and optimizer, where they are varied.
        images_per_s: simulated throughput.
        waiting_share: simulated share of the workers' time spent waiting.
        held_back: bottleneck of the dry run, in words.
        machine: machine type of all hosts, from a price list; empty: the cluster's own.
        hosts: number of hosts.
        price_per_hour: price of those hosts; None if unknown.
        compress_s: time of compression per image of all workers, which virtual time does not include.
        cuts_network: whether workers compute together, so that it learns as one large batch.
    """

    strategy: str
    family: str
    workers: int
    options: Mapping[str, Any]
    images_per_s: float = math.nan
    waiting_share: float = math.nan
    held_back: str = ""
    machine: str = ""
    hosts: int = 0
    price_per_hour: float | None = None
    compress_s: float = 0.0
    cuts_network: bool = False

    def with_compressing(self, images_per_s: float) -> float:
        """Return the images per second that remain of a rate in virtual time once compression is counted."""
        return images_per_s / (1 + self.compress_s * images_per_s)

    @property
    def learns_as(self) -> tuple[Any, ...]:
        """Key of the candidate's learning: everything that its images to a target depend on."""
        return self.family, self.workers, *map(str, self.options.items())

    @property
    def name(self) -> str:
        """The candidate in words."""
        other = "".join(f", {key} {value}" for key, value in self.options.items())
        on = f" on {self.machine}" if self.machine else ""
        return f"{self.strategy}, {counted(self.workers, 'worker')}{other}{on}"


def with_servers(name: str, workers: int) -> list[str]:
    """Return a spec with every number and place of servers that it leaves open.

    Args:
        name: the spec.
        workers: number of workers, the upper bound of the servers.
    """
    made, given = strategy_from(name), parse(name)
    fields = type(made).model_fields
    varied: dict[str, list[Any]] = {}
    if "servers" in fields and "servers" not in given.arguments and made.traits(workers).servers:
        varied["servers"] = [
            1 << power for power in range(_MOST_SERVERS.bit_length()) if 1 << power <= workers
        ]
    if "placement" in fields and "placement" not in given.arguments and made.traits(workers).servers:
        varied["placement"] = [None, "dedicated"]
    found = []
    for values in product(*varied.values()):
        chosen = {key: value for key, value in zip(varied, values, strict=True) if value is not None}
        found.append(str(Spec(given.name, {**given.arguments, **chosen})))
    return found


def rehearse(
    where: Cluster,
    candidates: Sequence[Candidate],
    options: Mapping[str, Any],
    refused: dict[str, str],
    *,
    steps: int = _STEPS,
) -> list[Candidate]:
    """Return the candidates that can be run, with their throughput, the highest first.

    Args:
        where: cluster; its faults are ignored.
        candidates: candidates to simulate.
        options: options of the job, for all of them.
        refused: receiver of the reason of every candidate that cannot be run, by its name.
        steps: steps of a worker, at least; more where workers exchange rarely.
    """
    shared = {key: value for key, value in options.items() if key not in ("epochs",)}
    if isinstance(shared.get("data", "fashion-mnist"), str) and not is_sizes(shared.get("model")):
        shared["data"] = opened(configure({key: shared[key] for key in _OF_IMAGES if key in shared}))
        shared = {key: value for key, value in shared.items() if key not in ("image_size", "scale")}
    paces: dict[Any, Cluster] = {}
    found = []
    for each in candidates:
        try:
            config = configure(
                {}, {**shared, **each.options, "strategy": each.strategy, "workers": each.workers}
            )
            if config.batch_size not in paces:
                paces[config.batch_size] = paced_for(where, config)
            settled, _ = with_stages_settled(paces[config.batch_size], config)
            if settled is not config:
                config, each = settled, replace(each, strategy=str(settled.strategy))
            traits = strategy_from(each.strategy).traits(each.workers)
            length = min(_MOST_STEPS, max(steps, _ROUNDS * traits.exchange_every))
            dry_run, _ = assemble_dry_run(config, length)
            laid_out(paces[config.batch_size], dry_run)  # refuses faults that name ranks which are not there
            layout = laid_out(paces[config.batch_size].model_copy(update={"faults": ()}), dry_run)
        except RequestError as error:
            refused.setdefault(each.name, str(error))
            continue
        figures = RunFigures()
        emit: Callable[[Event], None] = figures.add
        simulate_dry_on(layout, dry_run, emit)
        bound = held_back(figures)
        found.append(
            replace(
                each,
                images_per_s=figures.images_per_s,
                waiting_share=figures.waiting_share,
                held_back=bound.bottleneck if bound else "",
                hosts=len(layout.hosts_used),
                price_per_hour=layout.price_per_hour,
                cuts_network=traits.cuts_network,
            )
        )
    return sorted(found, key=lambda each: -each.images_per_s)


def write_prediction(folder: Path, cluster: str, rehearsed: Candidate) -> Path:
    """Write the forecast of a dry run into the folder of its run."""
    prediction = {
        "cluster": cluster,
        "images_per_s": rehearsed.images_per_s,
        "waiting_share": rehearsed.waiting_share,
        "held_back": rehearsed.held_back,
    }
    path = folder / PREDICTION_FILE
    UNCLAIMED.write(path, json.dumps(prediction, indent=2) + "\n")
    return path


@dataclass(frozen=True)
class Choice:
    """The strategy of a run.

    Attributes:
        candidate: candidate that was chosen, with its dry run.
        reason: reason in a sentence.
        cluster: name of the cluster of the dry run.
    """

    candidate: Candidate
    reason: str
    cluster: str


@dataclass(frozen=True)
class Auto:
    """Rule for the choice of a strategy.

    Attributes:
        cluster: cluster of the run; empty: this machine, which is measured.
        margin: ratio of images per second that outweighs the possible cost of stale updates; averaged models need a
            fifth of the lead.
    """

    cluster: str = ""
    margin: float = 1.5

    @classmethod
    def parse(cls, text: str) -> Auto | None:
        """Read a spec; return None if it is that of a strategy.

        Raises:
            RequestError: it has other keys than these, or impossible values.
        """
        if text.split("(")[0].strip() != AUTO:
            return None
        given = parse(text).arguments
        for key in given:
            if key not in cls.__dataclass_fields__:
                raise unknown(f"key of {AUTO}", key, cls.__dataclass_fields__)
        made = cls(**given)
        if not isinstance(made.margin, int | float) or not made.margin >= 1:
            raise RequestError(f"auto: margin must be at least 1 (given {made.margin})")
        return made

    def choose(self, config: RunConfig, start_method: str = "spawn") -> Choice:
        """Return the strategy for a run, and why.

        Args:
            config: configuration of the run; its strategy is not regarded.
            start_method: start method of the processes between which links are measured.

        Raises:
            RequestError: no strategy can be used.
        """
        measure = self.cluster == ""
        where = this_machine(config, start_method) if measure else open_cluster(self.cluster)
        return self.chosen(where, config)

    def chosen(self, where: Cluster, config: RunConfig) -> Choice:
        """As `choose`, on a cluster."""
        workers = config.workers
        options: dict[str, Any] = {
            name: getattr(config, name) for name in config.model_fields_set - {"strategy", "workers", "seed"}
        }
        refused: dict[str, str] = {}
        candidates = [
            Candidate(strategy=spec, family=name, workers=workers, options={})
            for name in STRATEGIES
            for spec in with_servers(name, workers)
        ]
        found = rehearse(where, candidates, _of_dry_runs(options), refused)
        best = self._best_allowed(found, config, refused)
        if best is None:
            raise RequestError(f"auto: {next(iter(refused.values()), 'there is no candidate')}")
        found = [each for each in found if each.family not in refused]
        fastest, safe = found[0], next((each for each in found if self.outweighs(each) == 1), None)

        def rate(candidate: Candidate) -> str:
            slow = candidate.held_back not in ("", COMPUTING)
            bound = f", bottleneck: {candidate.held_back}" if slow else ""
            return f"{candidate.strategy}: {whole(candidate.images_per_s)} images/s in a dry run{bound}"

        def times(candidate: Candidate, other: Candidate) -> str:
            return f"{candidate.images_per_s / other.images_per_s:.2f}"

        if fastest is best:
            reason = f"{rate(best)}, the most of {len(found)} candidates"
        else:
            reason = (
                f"{rate(best)}; {fastest.strategy} has {times(fastest, best)} times as many, which its stale or "
                f"averaged updates may cost (auto(margin={self.margin:g}))"
            )
        if safe is not None and best is not safe:
            reason += f"; {times(best, safe)} times those of {safe.strategy}"
        return Choice(best, reason, where.name)

    def _best_allowed(
        self, found: Sequence[Candidate], config: RunConfig, refused: dict[str, str]
    ) -> Candidate | None:
        """Return the best candidate that the run's other options allow; None without any.

        Args:
            found: candidates with their dry runs.
            config: configuration of the run.
            refused: receiver of the reasons of others, by family.
        """
        for each in sorted(found, key=lambda each: -each.images_per_s / self.outweighs(each)):
            if each.family in refused:
                continue
            try:
                assemble(
                    config.model_copy(update={"strategy": each.strategy}), CheckpointConfig(checkpoints=0)
                )
            except RequestError as error:
                refused[each.family] = str(error)
            else:
                return each
        return None

    def outweighs(self, candidate: Candidate) -> float:
        """Return the ratio of images per second that outweighs the possible cost of a candidate's updates."""
        traits = strategy_from(candidate.strategy).traits(candidate.workers)
        if traits.identical:
            return 1.0
        averages = not traits.servers and traits.updates == 1
        return 1 + (self.margin - 1) / 5 if averages else self.margin


_OF_IMAGES = ("data", "model", "weights", "image_size", "scale", "skip_unreadable")


def _of_dry_runs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that decide how long its steps take."""
    kept = ("data", "model", "batch_size", "image_size", "scale", "skip_unreadable", "compress", "drop_last")
    return {key: value for key, value in options.items() if key in kept}


def this_machine(config: RunConfig, start_method: str) -> Cluster:
    """Measure this machine with a few steps of a run's network: a cluster of one host with a place for every worker.

    Args:
        config: configuration of the run.
        start_method: start method of the processes between which links are measured.
    """
    threads = config.threads or 1
    alone = config.model_copy(update={"strategy": "synchronous", "workers": 1, "threads": threads})
    job = assemble(alone, CheckpointConfig(checkpoints=0))
    inside = measure_inside(start_method)
    with computing_with(threads):
        step = profile_step(job, _MEASURED_STEPS)
        measured = Profile((measure_host(),), (1.0,), threads, inside, None, step, job.model_name)
        measured = replace(measured, step_of=step_of(alone, job, _MEASURED_STEPS, step))
    found = measured.cluster("this machine")
    (host,) = found.hosts
    crowd = max(1.0, config.workers * threads / host.cores)  # workers that share cores take turns
    kind = host.model_copy(update={"workers": max(config.workers, host.workers or 1), "speed": 1 / crowd})
    return found.model_copy(update={"hosts": (kind,)})
