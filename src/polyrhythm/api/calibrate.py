"""A cluster file fitted to measured throughputs, for the verb `calibrate`, with how well these determine it.

A measurement is simulated as `simulate --gradients none --steps N` does it: the same configuration, layout and seed.
The fit (`planning/cost_fit.py`) needs few of these dry runs. Steps are fewer where many workers make them expensive.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyrhythm.api.simulate import laid_out, multiply_adds_of, network_limits, paced_for, with_stages_settled
from polyrhythm.config.assemble import opened, strategy_from, without_images
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dataset import Dataset
from polyrhythm.errors import RequestError, unknown
from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.devices import computing_with
from polyrhythm.launch.forked import forked
from polyrhythm.models.architectures.sizes import is_sizes
from polyrhythm.planning.cost_fit import CostFit, Numbers, fit_costs
from polyrhythm.reporting.quantities import counted
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster, cluster_text, open_cluster
from polyrhythm.simulation.fitted import UNKNOWNS, value_of, with_values
from polyrhythm.simulation.layout import Layout
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.simulation.step_times.constant import Constant
from polyrhythm.user_files import check_new_file

_log = logging.getLogger(__name__)
_WORK, _FEWEST_STEPS, _MOST_STEPS, _ROUNDS, _ALIKE = 2400, 12, 200, 4, 3
"""Total work of all measurements in steps of a dry run times messages a step, limits of the steps, and steps that
do not differ."""
_SHARE = 1 / 3
"""Share of the steps of a dry run that is only compared with another of the same length."""
_MOST_SCALING = 1.5
"""Largest speedup over one worker per worker: smaller batches may fit caches better."""
_MOST_REPEATED, _MOST_MISSED = 2.0, 2.0
"""Ratios of two throughputs of one set-up, and of a throughput to that of the fit, that are not doubted."""
_BANDWIDTHS = ("nic_bandwidth", "inside_bandwidth", "server_bandwidth", "server_update")
_FELT = 0.05
"""By what a further measurement must change when an unknown changes e-fold."""
_LARGER = 1.1
"""Factor of a cost by which its effect on a further measurement is found."""
_MOST_PER_WORKER = 1e15
"""Multiply-adds a second: more than any accelerator makes in training."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured throughput.

    Attributes:
        strategy: spec of the strategy.
        workers: number of workers.
        images_per_s: images per second of all of them, or other examples.
        batch: batch size of each worker; None: that of all measurements.
    """

    strategy: str
    workers: int
    images_per_s: float
    batch: int | None = None

    @classmethod
    def parse(cls, text: str, strategy: str) -> Measurement:
        """Read `8 workers: 378 images/s`, also with strategy and batch size, as `easgd, 8 workers, batch 32: 378`.

        Args:
            text: measurement.
            strategy: strategy of a text that names none.

        Raises:
            RequestError: it cannot be read.
        """
        found = re.fullmatch(
            r"\s*(?:(.+?),)?\s*(\d+) workers?\s*(?:,\s*batch (\d+)\s*)?:\s*([0-9.,]*\d(?:[eE][+-]?\d+)?)\s*"
            r"(?:(?:images|img|samples|examples|sequences|sentences)/s)?\s*",
            text,
        )
        if found is None:
            raise RequestError(
                f"cannot read the throughput {text!r}: write '8 workers: 378 images/s', or with a strategy "
                "'parameter_server(servers=2), 8 workers: 378 images/s'"
            )
        try:
            rate = float(found[4].replace(",", ""))
        except ValueError:
            rate = 0.0
        workers, batch = int(found[2]), None if found[3] is None else int(found[3])
        if rate <= 0 or workers < 1 or batch == 0:
            raise RequestError(f"the throughput {text!r} must be above 0, of at least one worker")
        return cls(strategy=(found[1] or strategy).strip(), workers=workers, images_per_s=rate, batch=batch)

    def __str__(self) -> str:
        """Return it in words, without what was measured."""
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.strategy}, {self.workers} worker{'s' * (self.workers != 1)}{batch}"


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
    processes: int = 1,
) -> dict[str, Any]:
    """Fit values of a cluster file to measured throughputs.

    Args:
        cluster: a ready cluster or a cluster file; the fit begins at its values.
        throughput: measurements, as `8 workers: 378 images/s` or `easgd, 8 workers, batch 32: 378 images/s`.
        unknowns: quantities to fit, of `UNKNOWNS`.
        model: network that was trained.
        data: data set that gives classes and image size, unless `classes` and `image_size` do.
        batch_size: batch size of a worker in measurements that name none.
        strategy: strategy of measurements that name none.
        classes: number of classes, instead of the data's.
        image_size: pixels a side, instead of the data's.
        out: cluster file to write, which must not exist; None: none is written.
        processes: forked processes for dry runs that do not depend on each other; 1: none is forked.

    Returns:
        A JSON-able dict: `unknowns` with values and intervals of 80 %, `measurements` with the prediction for each by
        the fit to all and by the fit to all others (`left_out`), `next`: the further measurement that would determine
        most of the rest, and `file`.

    Raises:
        RequestError: the request is wrong, measurements contradict each other or what machines can do, or there are
            fewer measurements than unknowns.
    """
    where = open_cluster(cluster)
    seen = [Measurement.parse(text, strategy) for text in throughput]
    names = list(dict.fromkeys(unknowns))
    for name in names:
        if name not in UNKNOWNS:
            raise unknown("unknown to fit", name, UNKNOWNS)
    if not names:
        raise RequestError(f"name the values to fit: {', '.join(UNKNOWNS)}")
    if len(seen) < len(names):
        raise RequestError(
            f"{len(names)} unknowns ({', '.join(names)}) cannot be determined from {len(seen)} measurements: give "
            "at least "
            "as many --throughput as unknowns"
        )
    _check_scaling(seen)
    _check_repeated(seen)
    if out is not None:
        check_new_file(Path(out))
    images = _images(model, data, classes, image_size)
    common = {"data": images, "model": model, "batch_size": batch_size}
    first = _configured(seen[0], common)
    _check_arithmetic(seen, first)
    where = paced_for(where, first).model_copy(update={"faults": ()})
    start = np.asarray([value_of(where, name) for name in names])
    sign = np.asarray([-1.0 if name in _BANDWIDTHS else 1.0 for name in names])

    def with_costs(costs: Numbers) -> Cluster:
        return with_values(where, dict(zip(names, map(float, start * costs**sign), strict=True)))

    with computing_with(1):
        set_ups = [_SetUp.of(where, each, common, _WORK // len(seen), _FEWEST_STEPS) for each in seen]

        def seconds(row: int, costs: Numbers, share: float = 1.0) -> float:
            return 1 / set_ups[row].images_per_s(with_costs(costs), share)

        def seconds_of_all(asks: Sequence[tuple[int, Numbers]], share: float = 1.0) -> list[float]:
            """Return seconds; the dry runs that take longest begin first, so that processes end together."""
            order = sorted(range(len(asks)), key=lambda place: -set_ups[asks[place][0]].messages)
            made = forked(seconds, [(*asks[place], share) for place in order], processes)
            return [each for _, each in sorted(zip(order, made, strict=True))]

        asked = [(each.strategy, each.workers, each.batch) for each in seen]
        fitted = fit_costs(
            seconds,
            [1 / each.images_per_s for each in seen],
            np.asarray([[each.depends_on(name) for name in names] for each in set_ups]),
            simulate_all=seconds_of_all,
            compare_all=lambda asks: seconds_of_all(asks, _SHARE),
            same_as=[asked.index(each) for each in asked],
        )
        _log_misses(seen, fitted.seconds, names)
        further = (
            None
            if fitted.determined.all()
            else _further(seen, where, common, names, fitted, with_costs, processes)
        )
    values = [_unknown_of(fitted, place, name, start, sign) for place, name in enumerate(names)]
    if out is not None:
        made = with_costs(fitted.costs).model_copy(update={"faults": open_cluster(cluster).faults})
        source = f"{made.source} Fitted to {len(seen)} throughputs: {', '.join(names)}.".strip()
        ends = {
            each["name"]: tuple(each[end] and each[end] / each["value"] for end in ("low", "high"))
            for each in values
        }
        made = made.model_copy(update={"source": source, "fitted": {**made.fitted, **ends}})
        Path(out).write_text(cluster_text(made), encoding="utf-8")
    return {
        "cluster": where.name,
        "unknowns": values,
        "measurements": [
            {
                "what": str(each),
                "images_per_s": each.images_per_s,
                "predicted": float(1 / fitted.seconds[row]),
                "left_out": None if math.isnan(fitted.left_out[row]) else float(1 / fitted.left_out[row]),
                "steps": set_ups[row].dry_run.steps,
            }
            for row, each in enumerate(seen)
        ],
        "next": further,
        "file": None if out is None else str(out),
    }


def _unknown_of(fitted: CostFit, place: int, name: str, start: Numbers, sign: Numbers) -> dict[str, Any]:
    """Return a fitted unknown in its own unit; `low` or `high` is None where the measurements set no such limit."""
    ends = [
        float(start[place] * end ** sign[place]) if 0 < end < math.inf else None
        for end in (fitted.low[place], fitted.high[place])
    ]
    low, high = ends if sign[place] > 0 else ends[::-1]
    return {
        "name": name,
        "before": float(start[place]),
        "value": float(start[place] * fitted.costs[place] ** sign[place]),
        "low": low,
        "high": high,
        "told": bool(fitted.determined[place]),
    }


@dataclass(frozen=True)
class _SetUp:
    """A measured set-up that can be simulated.

    Attributes:
        dry_run: the dry run.
        layout: placement of its ranks on the cluster's hosts.
        longer: time of its steps relative to that of the common batch.
    """

    dry_run: DryRun
    layout: Layout
    longer: float = 1.0

    @classmethod
    def of(
        cls, where: Cluster, what: Measurement, common: Mapping[str, Any], work: int = 0, fewest: int = _ALIKE
    ) -> _SetUp:
        """Return the set-up of a measurement, with steps for some messages of a dry run, or at least a few.

        Raises:
            RequestError: the set-up is impossible, or its batch is another one and its step time is not known.
        """
        config = _configured(what, common)
        longer = 1.0
        if what.batch not in (None, common["batch_size"]):
            if where.step_of is None or where.step_of.factor(1.0) is None:
                raise RequestError(
                    f"{what}: cluster {where.name} does not specify how step times grow with the batch: give it "
                    "step_of with multiply_adds, or measurements of one batch"
                )
            longer = paced_for(where, config).step_factor / where.step_factor
        config, _ = with_stages_settled(where, config)
        traits = strategy_from(config.strategy).traits(what.workers)
        steps = work // (what.workers * (2 * traits.servers or what.workers))
        alike = isinstance(where.step_time, Constant) and where.shared_slowness is None
        if alike and traits.lockstep and not traits.servers:
            steps, fewest = 0, _ALIKE  # every round is as long as the others
        steps = max(min(_MOST_STEPS, max(fewest, steps)), _ROUNDS * min(traits.exchange_every, _MOST_STEPS))
        dry_run, _ = assemble_dry_run(config, steps)
        return cls(dry_run, laid_out(where, dry_run), longer)

    @property
    def messages(self) -> int:
        """About how many messages its dry run sends, as `_WORK` counts them."""
        return (
            self.dry_run.steps
            * self.dry_run.workers
            * (2 * self.dry_run.traits.servers or self.dry_run.workers)
        )

    def images_per_s(self, where: Cluster, share: float = 1.0) -> float:
        """Return its throughput on a cluster, in a share of its rounds of steps, but in a few steps at least."""
        where = where.model_copy(update={"step_factor": where.step_factor * self.longer})
        whole = self.dry_run.steps
        length = max(1, min(whole, self.dry_run.strategy.traits(self.dry_run.workers).exchange_every))
        rounds = max(math.ceil((_ALIKE + 1) / length), round(share * whole / length))
        steps = min(whole, rounds * length)
        dry_run = replace(self.dry_run, steps=steps)
        events: list[Event] = []
        simulate_dry_on(laid_out(where, dry_run), dry_run, events.append)
        end = events[-1]
        assert isinstance(end, RunEnded)
        return float(end.result["images_per_s"])

    def depends_on(self, unknown: str) -> bool:
        """Whether an unknown can change its throughput at all."""
        hosts, servers = self.layout.host_of, len(self.layout.roles.servers)
        apart = len(set(hosts)) > 1
        match unknown:
            case "nic_bandwidth" | "nic_latency":
                return apart
            case "inside_bandwidth":
                return len(set(hosts)) < len(hosts)
            case "server_bandwidth":
                return apart and servers > 0
            case "server_update":
                return servers > 0
            case _:
                return True


def _configured(what: Measurement, common: Mapping[str, Any]) -> RunConfig:
    batch = {} if what.batch is None else {"batch_size": what.batch}
    return configure({}, {**common, **batch, "strategy": what.strategy, "workers": what.workers})


def _images(model: Any, data: Any, classes: int | None, image_size: int | None) -> Dataset:
    """Return data of some classes and image size; the images themselves are not looked at."""
    if is_sizes(model):
        return without_images()
    if classes is None or image_size is None:
        size = {} if image_size is None else {"image_size": image_size}
        dataset = opened(configure({"data": data, "model": model} | size))
        return dataset if classes is None else replace(dataset, classes=tuple(map(str, range(classes))))
    return without_images(classes, image_size)


def _check_repeated(seen: Sequence[Measurement]) -> None:
    """Refuse throughputs of one set-up that contradict each other.

    Raises:
        RequestError: they differ by too much; the message has both.
    """
    rates: dict[str, list[float]] = {}
    for each in seen:
        rates.setdefault(str(each), []).append(each.images_per_s)
    for what, of_one in rates.items():
        if max(of_one) > _MOST_REPEATED * min(of_one):
            raise RequestError(
                f"{what} has {min(of_one):g} and {max(of_one):g} images/s, which contradict each other: check the units"
            )


def _log_misses(seen: Sequence[Measurement], seconds: Numbers, names: Sequence[str]) -> None:
    """Warn of throughputs that no values of the unknowns explain."""
    for each, predicted_s in zip(seen, seconds, strict=True):
        times = each.images_per_s * predicted_s
        if not 1 / _MOST_MISSED < times < _MOST_MISSED:
            _log.warning(
                "%s: %g images/s contradicts the other throughputs: the best fit of %s gives %.3g; check its unit",
                each,
                each.images_per_s,
                ", ".join(names),
                1 / predicted_s,
            )


def _check_scaling(seen: Sequence[Measurement]) -> None:
    """Refuse a throughput that workers of another measurement would have to exceed by far.

    Raises:
        RequestError: a throughput is too high; the message names both measurements.
    """
    alone = [each for each in seen if each.workers == 1]
    for each in seen:
        for one in alone:
            times = each.images_per_s / (each.workers * one.images_per_s)
            if times > _MOST_SCALING:
                raise RequestError(
                    f"{each}: {each.images_per_s:g} images/s is {times:.3g} times what "
                    f"{counted(each.workers, 'worker')} of {one.images_per_s:g} images/s ({one}) "
                    "compute: check the units of both"
                )


def _check_arithmetic(seen: Sequence[Measurement], config: RunConfig) -> None:
    """Reject a throughput that no accelerator could reach, of a network with steps that follow from its shapes.

    Raises:
        RequestError: a throughput is too high; the message has the arithmetic.
    """
    if network_limits(config):
        return
    per_image = multiply_adds_of(config) / config.worker_batch
    for each in seen:
        per_worker = per_image * each.images_per_s / each.workers
        if per_worker > _MOST_PER_WORKER:
            raise RequestError(
                f"{each}: {each.images_per_s:g} images/s would be {per_worker:.1e} multiply-adds/s per worker, more "
                "than any accelerator makes: check its unit, --model, --image-size and --batch-size"
            )


def _further(
    seen: Sequence[Measurement],
    where: Cluster,
    common: Mapping[str, Any],
    names: Sequence[str],
    fitted: CostFit,
    with_costs: Callable[[Numbers], Cluster],
    processes: int,
) -> str | None:
    """Return the additional measurement that would determine most of the unknown costs; None if none would.

    Of one worker and of as many as there are places (8 at most), without and with a server, each is simulated at the
    fit, with every cost a little larger, and the one that leaves the least variance is best.
    """
    places = min(8, sum(machine.places for machine in where.machines))
    usual = ("synchronous", "parameter_server(servers=1)")
    asked = [
        Measurement(strategy=spec, workers=count, images_per_s=1.0) for count in (1, places) for spec in usual
    ]
    open_ones = ~fitted.determined
    known = {(each.strategy, each.workers) for each in seen}
    best: str | None = None
    best_gain = 0.0
    information = fitted.slopes.T @ fitted.slopes
    set_ups: dict[str, _SetUp] = {}
    for each in asked:
        with suppress(RequestError):
            if (each.strategy, each.workers) not in known:
                set_ups[str(each)] = _SetUp.of(where, each, common)
    larger = np.where(np.eye(len(names), dtype=bool), _LARGER * fitted.costs, fitted.costs)
    tasks = [(each, fitted.costs) for each in set_ups] + [
        (each, larger[place])
        for each, set_up in set_ups.items()
        for place, name in enumerate(names)
        if set_up.depends_on(name)
    ]
    rates = forked(lambda each, costs: set_ups[each].images_per_s(with_costs(costs)), tasks, processes)
    found = {(each, costs.tobytes()): rate for (each, costs), rate in zip(tasks, rates, strict=True)}
    for name in set_ups:
        here = found[name, fitted.costs.tobytes()]
        grown = np.asarray([found.get((name, costs.tobytes()), here) for costs in larger])
        slopes = np.log(here / grown) / math.log(_LARGER)
        if np.abs(slopes[open_ones]).max() < _FELT:
            continue
        small = 1e-4 * np.eye(len(names))
        before = np.diag(np.linalg.inv(information + small))[open_ones]
        after = np.diag(np.linalg.inv(information + np.outer(slopes, slopes) + small))[open_ones]
        gain = float(np.log(before / after).sum())
        if gain > best_gain:
            best, best_gain = name, gain
    return best
