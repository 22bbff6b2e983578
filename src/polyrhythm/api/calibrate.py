"""A cluster file fitted to measured throughputs, for the verb `calibrate`."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyrhythm.api.simulate import laid_out
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.dry_run import shapes_of, sizes_for
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError, unknown
from polyrhythm.planning.analysis import step_multiply_adds
from polyrhythm.planning.calibration import UNKNOWNS, Numbers, fit, value_of, with_values
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster, cluster_text, open_cluster
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.user_files import check_new_file

_STEPS, _ROUNDS, _MOST_STEPS = 60, 4, 400
_FEW = 8
"""Measurements up to which each is also predicted from all others."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured throughput.

    Attributes:
        strategy: its spec.
        workers: how many trained.
        images_per_s: of all of them.
    """

    strategy: str
    workers: int
    images_per_s: float

    @classmethod
    def parse(cls, text: str, strategy: str) -> Measurement:
        """Read `8 workers: 378 images/s`, or with the strategy first, as `easgd, 8 workers: 378`.

        Args:
            text: what was measured.
            strategy: where the text names none.

        Raises:
            RequestError: it cannot be read.
        """
        found = re.fullmatch(
            r"\s*(?:(.+?),)?\s*(\d+) workers?\s*:\s*([0-9.,]*\d(?:[eE][+-]?\d+)?)\s*(?:images/s|img/s)?\s*",
            text,
        )
        if found is None:
            raise RequestError(
                f"cannot read the throughput {text!r}: write '8 workers: 378 images/s', or with a strategy "
                "'parameter_server(servers=2), 8 workers: 378 images/s'"
            )
        try:
            rate = float(found[3].replace(",", ""))
        except ValueError:
            rate = 0.0
        workers = int(found[2])
        if rate <= 0 or workers < 1:
            raise RequestError(f"the throughput {text!r} must be above 0, of at least one worker")
        return cls(strategy=(found[1] or strategy).strip(), workers=workers, images_per_s=rate)

    def __str__(self) -> str:
        """Return it in words, without what was measured."""
        return f"{self.strategy}, {self.workers} worker{'s' * (self.workers != 1)}"


def calibrate(
    *,
    cluster: str | Path,
    throughput: Sequence[str],
    unknowns: Sequence[str],
    model: Any = "lenet5",
    data: Any = "fashion-mnist",
    batch_size: int = 64,
    strategy: str = "synchronous",
    classes: int | None = None,
    image_size: int | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Fit what a cluster file leaves open to measured throughputs.

    Args:
        cluster: a ready cluster or a cluster file; its values are where the fit begins.
        throughput: measurements, as `8 workers: 378 images/s` or `easgd, 8 workers: 378 images/s`.
        unknowns: what to fit, of `UNKNOWNS`.
        model: that was trained.
        data: gives classes and pictures, unless `classes` and `image_size` do.
        batch_size: of a worker.
        strategy: of measurements that name none.
        classes: instead of the data's.
        image_size: pixels a side, instead of the data's.
        out: the cluster file to write, which must not exist; None: none is.

    Returns:
        A JSON-able dict: `unknowns` with values and intervals, `measurements` with what is predicted for each, also
        from all others (`left_out`) where there are enough, and `file`.

    Raises:
        RequestError: something of it is wrong, or there are fewer measurements than unknowns.
    """
    where = open_cluster(cluster)
    seen = [Measurement.parse(text, strategy) for text in throughput]
    names = list(dict.fromkeys(unknowns))
    for name in names:
        if name not in UNKNOWNS:
            raise unknown("unknown to fit", name, UNKNOWNS)
    if not names:
        raise RequestError(f"say what to fit: {', '.join(UNKNOWNS)}")
    if len(seen) < len(names):
        raise RequestError(
            f"{len(names)} unknowns ({', '.join(names)}) cannot be told from {len(seen)} measurements: give at least "
            "as many --throughput as unknowns"
        )
    if out is not None:
        check_new_file(Path(out))
    if classes is not None and image_size is not None:
        count, shape = classes, (3, image_size, image_size)
    else:
        dataset = open_data(data, image_size=image_size)
        count, shape = classes or len(dataset.classes), dataset.image_shape
    shapes = shapes_of(model, count, shape)
    if where.step_of is not None and where.step_of.factor(1.0) is not None:
        work = step_multiply_adds(copy.deepcopy(shapes), shape, batch_size)
        where = where.model_copy(update={"step_factor": where.step_of.factor(work)})
    sizes = {
        each: sizes_for(copy.deepcopy(shapes), shape, strategy_from(each.strategy), each.workers)
        for each in seen
    }
    start = [value_of(where, name) for name in names]

    def predicted(of: Sequence[Measurement]) -> Any:
        def predict(values: Numbers) -> Numbers:
            made = with_values(where, dict(zip(names, map(float, values), strict=True)))
            return np.asarray([_rehearse(made, each, sizes[each], batch_size) for each in of])

        return predict

    rates = [each.images_per_s for each in seen]
    found, rehearsed = fit(names, start, predicted(seen), rates)
    values = [each.value for each in found]
    told: list[dict[str, Any]] = []
    for place, each in enumerate(seen):
        told.append(
            {
                "what": str(each),
                "images_per_s": each.images_per_s,
                "predicted": float(rehearsed[place]),
                "left_out": None,
            }
        )
        if len(names) < len(seen) <= _FEW:
            others = [*seen[:place], *seen[place + 1 :]]
            without, _ = fit(names, values, predicted(others), [other.images_per_s for other in others])
            alone = predicted([each])(np.asarray([one.value for one in without]))
            told[-1]["left_out"] = float(alone[0])
    if out is not None:
        fitted = with_values(where, dict(zip(names, values, strict=True)))
        source = f"{fitted.source} Fitted to {len(seen)} throughputs: {', '.join(names)}.".strip()
        Path(out).write_text(cluster_text(fitted.model_copy(update={"source": source})), encoding="utf-8")
    return {
        "cluster": where.name,
        "unknowns": [
            {key: value if value not in (float("inf"), 0.0) else None for key, value in asdict(each).items()}
            for each in found
        ],
        "measurements": told,
        "file": None if out is None else str(out),
    }


def _rehearse(where: Cluster, what: Measurement, sizes: ModelSizes, batch_size: int) -> float:
    strategy = strategy_from(what.strategy)
    strategy.check(what.workers)
    every = strategy.traits(what.workers).exchange_every
    dry_run = DryRun(
        strategy=strategy,
        workers=what.workers,
        sizes=sizes,
        steps=min(_MOST_STEPS, max(_STEPS, _ROUNDS * every)),
        batch_size=batch_size,
    )
    figures = RunFigures()
    simulate_dry_on(laid_out(where.model_copy(update={"faults": ()}), dry_run), dry_run, figures.add)
    return figures.images_per_s
