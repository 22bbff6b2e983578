"""Rehearsals: how many images a second each way of running a job would have on a cluster, by dry runs in virtual time.

What `plan`, `why` and `train --strategy auto` have in common.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from polyrhythm.api.simulate import laid_out, paced_for, with_stages_settled
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError
from polyrhythm.events import Event
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import held_back
from polyrhythm.reporting.pages.report import PREDICTION_FILE
from polyrhythm.reporting.quantities import counted
from polyrhythm.simulation.cluster import Cluster
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
"""Of every family those that most often win."""
_STEPS, _ROUNDS, _MOST_STEPS = 40, 4, 400
_MOST_SERVERS = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the job.

    Attributes:
        strategy: its spec, servers and placement included.
        family: the spec without them: candidates of one family, workers and options learn alike.
        workers: how many train.
        options: batch size and optimizer, where they are varied.
        images_per_s: by rehearsal.
        waiting_share: of the workers' time, likewise.
        held_back: what held the rehearsal back, in words.
        machine: of a price list that all hosts are; empty: the cluster's own.
        hosts: that it takes.
        price_per_hour: of those; None if it is not known.
        compress_s: of every image that all workers train on: what compressing takes, for which virtual time has none.
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
        """Return the images a second that are left of so many in virtual time."""
        return images_per_s / (1 + self.compress_s * images_per_s)

    @property
    def learns_as(self) -> tuple[Any, ...]:
        """What its images to a target depend on."""
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
        workers: how many train; there are at most as many servers.
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
    where: Cluster, candidates: Sequence[Candidate], options: Mapping[str, Any], refused: dict[str, str]
) -> list[Candidate]:
    """Return the candidates that can be run, with their throughput, the highest first.

    Args:
        where: the cluster; its faults are left out.
        candidates: what to rehearse.
        options: of the job, for all of them.
        refused: receives the reason of every candidate that cannot be run, by its name.
    """
    told = {key: value for key, value in options.items() if key not in ("epochs",)}
    if isinstance(told.get("data", "fashion-mnist"), str):
        told["data"] = open_data(
            told.get("data", "fashion-mnist"),
            image_size=told.get("image_size"),
            scale=told.get("scale"),
            skip_unreadable=bool(told.get("skip_unreadable", False)),
        )
        told = {key: value for key, value in told.items() if key not in ("image_size", "scale")}
    paces: dict[Any, Cluster] = {}
    found = []
    for each in candidates:
        try:
            config = configure(
                {}, {**told, **each.options, "strategy": each.strategy, "workers": each.workers}
            )
            if config.batch_size not in paces:
                paces[config.batch_size] = paced_for(where, config)
            settled, _ = with_stages_settled(paces[config.batch_size], config)
            if settled is not config:
                config, each = settled, replace(each, strategy=str(settled.strategy))
            traits = strategy_from(each.strategy).traits(each.workers)
            steps = min(_MOST_STEPS, max(_STEPS, _ROUNDS * traits.exchange_every))
            dry_run, _ = assemble_dry_run(config, steps)
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
                held_back=bound.text.partition(":")[0] if bound else "",
                hosts=len(layout.hosts_used),
                price_per_hour=layout.price_per_hour,
                cuts_network=traits.cuts_network,
            )
        )
    return sorted(found, key=lambda each: -each.images_per_s)


def write_prediction(folder: Path, cluster: str, rehearsed: Candidate) -> Path:
    """Write what a rehearsal says of a run into its folder."""
    told = {
        "cluster": cluster,
        "images_per_s": rehearsed.images_per_s,
        "waiting_share": rehearsed.waiting_share,
        "held_back": rehearsed.held_back,
    }
    path = folder / PREDICTION_FILE
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return path
