"""`--strategy auto`: the strategy of a run, chosen at its start.

    this machine    link inside it and a few steps of the network, measured ─▶ a cluster of one host
    or a cluster    auto(cluster=C.yaml)
    candidates      the strategies that most often win, with servers in every number and place, in rehearsal
    choice          the fastest that computes as one large batch, unless another has `margin` times its images a second

What stale or averaged updates cost in images is not known before training: `polyrhythm plan` trains in simulation to
find that out, while a dry run takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.api.profile import step_of
from polyrhythm.api.rehearsal import STRATEGIES, Candidate, rehearse, with_servers
from polyrhythm.config.assemble import assemble, strategy_from
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError, unknown
from polyrhythm.launch.devices import computing_with
from polyrhythm.planning.link import measure_inside
from polyrhythm.planning.profile import Profile, measure_host
from polyrhythm.planning.step import profile_step
from polyrhythm.reporting.quantities import whole
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.simulation.cluster import Cluster, open_cluster
from polyrhythm.specs import parse

NAME = "auto"
_MEASURED_STEPS = 8


@dataclass(frozen=True)
class Choice:
    """The strategy of a run.

    Attributes:
        candidate: that was chosen, rehearsed.
        reason: in a sentence.
        cluster: the name of what it was rehearsed on.
    """

    candidate: Candidate
    reason: str
    cluster: str


@dataclass(frozen=True)
class Auto:
    """How a strategy is chosen.

    Attributes:
        cluster: where the run will be; empty: on this machine, which is measured.
        margin: how many times as many images a second outweigh what stale or averaged updates may cost.
    """

    cluster: str = ""
    margin: float = 1.5

    @classmethod
    def parse(cls, text: str) -> Auto | None:
        """Read a spec; return None if it is that of a strategy.

        Raises:
            RequestError: it has other keys than these, or impossible values.
        """
        if text.split("(")[0].strip() != NAME:
            return None
        given = parse(text).arguments
        for key in given:
            if key not in cls.__dataclass_fields__:
                raise unknown(f"key of {NAME}", key, cls.__dataclass_fields__)
        made = cls(**given)
        if not isinstance(made.margin, int | float) or not made.margin >= 1:
            raise RequestError(f"auto: margin must be at least 1 (given {made.margin})")
        return made

    def choose(self, config: RunConfig, start_method: str = "spawn") -> Choice:
        """Return the strategy for a run, and why.

        Args:
            config: of the run; its strategy is not regarded.
            start_method: of the processes between which links are measured.

        Raises:
            RequestError: no strategy can be had.
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
        if not found:
            raise RequestError(f"auto: {next(iter(refused.values()), 'there is no candidate')}")
        safe = [each for each in found if strategy_from(each.strategy).traits(workers).identical]
        fastest, best = found[0], safe[0] if safe else found[0]
        rate = f"{whole(fastest.images_per_s)} images/s in rehearsal"
        bound = f", bound by {fastest.held_back}" if fastest.held_back else ""
        times = fastest.images_per_s / best.images_per_s
        if fastest is best:
            reason = f"{best.strategy}: the most images, {rate}{bound}, of {len(found)} candidates"
        elif times >= self.margin:
            reason = f"{fastest.strategy}: {rate}{bound}, {times:.2f} times those of {best.strategy}"
        else:
            reason = (
                f"{best.strategy}: {whole(best.images_per_s)} images/s in rehearsal; {fastest.strategy} has "
                f"{times:.2f} times as many, which its stale or averaged updates may cost "
                f"(auto(margin={self.margin:g}))"
            )
        return Choice(fastest if times >= self.margin else best, reason, where.name)


def _of_dry_runs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that decide how long its steps take."""
    kept = ("data", "model", "batch_size", "image_size", "scale", "skip_unreadable", "compress", "drop_last")
    return {key: value for key, value in options.items() if key in kept}


def this_machine(config: RunConfig, start_method: str) -> Cluster:
    """Measure this machine with a few steps of a run's network: a cluster of one host with a place for every worker.

    Args:
        config: of the run.
        start_method: of the processes between which links are measured.
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
