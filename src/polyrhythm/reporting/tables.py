"""The tables of a report: labels and texts, ready to be read."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.quantities import MINUTE_S, duration, percent, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from polyrhythm.reporting.figures import RunFigures

_LABELS = {
    "run": "Run",
    "strategy": "Strategy",
    "data": "Data",
    "model": "Model",
    "parameters": "Parameters",
    "workers": "Workers",
    "servers": "Servers",
    "workers_lost": "Workers failed",
    "workers_joined": "Replacements of failed workers",
    "workers_ejected": "Workers evicted by servers",
    "servers_lost": "Servers failed",
    "servers_joined": "Replacements of failed servers",
    "images_not_seen": "Training images not seen",
    "states_differed": "Times that workers' parameters or optimizer states differed",
    "gradients_dropped": "Gradients dropped, too late",
    "gradients_not_finite": "Gradients left out, not finite",
    "messages_refused": "Messages refused",
    "epochs": "Epochs",
    "steps": "Steps",
    "seconds": "Time",
    "images_per_s": "Images per second",
    "sustained_images_per_s": "Images per second while all workers trained",
    "test_images": "Test images",
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "test_top1": "Test top-1",
    "test_top5": "Test top-5",
    "staleness": "Staleness",
    "bytes_sent_per_step": "Bytes sent per step",
    "bytes_between_hosts_per_step": "Bytes sent between hosts per step",
    "gradients": "Gradients",
    "cluster": "Cluster",
    "hosts": "Hosts used",
    "energy_j": "Energy of this host's processors",
    "gpu_energy_j": "Energy of this host's GPUs",
    "price": "Price",
    "currency": "Currency",
    "parameters_sha256": "SHA-256 of the parameters",
}


def _energy(joules: float) -> str:
    return f"{joules / 3600:,.3g} Wh ({joules:,.0f} J), whatever else ran on them"


_WRITTEN: dict[str, Callable[[Any], str]] = {
    "seconds": lambda value: duration(value) + (f" ({value:,.1f} s)" if value >= MINUTE_S else ""),
    "images_per_s": whole,
    "sustained_images_per_s": whole,
    "test_top1": percent,
    "test_top5": percent,
    "train_loss": lambda value: f"{value:.4f}",
    "test_loss": lambda value: f"{value:.4f}",
    "bytes_sent_per_step": whole,
    "bytes_between_hosts_per_step": whole,
    "energy_j": _energy,
    "gpu_energy_j": _energy,
    "price": lambda value: "not known" if value is None else f"{value:.4g}",
    "messages_refused": lambda value: ", ".join(f"{count} {reason}" for reason, count in value.items()),
    "staleness": lambda value: f"mean {value['mean']:.2f}, largest {value['max']}",
}
_IF_NOT_ZERO = {
    "workers_lost",
    "workers_joined",
    "workers_ejected",
    "servers_lost",
    "servers_joined",
    "images_not_seen",
    "states_differed",
    "gradients_dropped",
    "gradients_not_finite",
    "messages_refused",
}
_ELSEWHERE = {"per_class", "confusion", "test_top1_interval", "waiting_share", "nothing_left_share"}
"""Figures that have a section of their own; the bottleneck's has all shares of the time."""


def facts(figures: RunFigures) -> dict[str, Any]:
    """Return the figures of a run by the names of `train --json`.

    Its result's figures win; a run that ended early has a partial result or none, and the rest follows from its events.
    """
    found: dict[str, Any] = {}
    if figures.started:
        start = figures.started
        found |= {"strategy": start.strategy, "data": start.data, "model": start.model}
        found |= {"parameters": start.parameters} if start.parameters else {}
        found |= {"workers": start.workers, "servers": start.servers, "epochs": start.epochs}
    found["seconds"] = figures.time_s
    if figures.together:
        found |= {"images_per_s": figures.images_per_s}
        found |= {"train_loss": figures.recent_loss} if not math.isnan(figures.recent_loss) else {}
        found |= {"steps": max(series.last.step for series in figures.workers.values())}
        found |= {"waiting_share": figures.waiting_share} if figures.waiting_share > 0 else {}
    if figures.evaluations:
        last = figures.evaluations[-1]
        found |= {"test_loss": last.test_loss, "test_top1": last.test_top1, "test_top5": last.test_top5}
    if figures.staleness.counts:
        found["staleness"] = {"mean": figures.staleness.mean, "max": figures.staleness.max}
    result = figures.ended.result if figures.ended else {}
    return found | {key: value for key, value in result.items() if value is not None or key == "price"}


def fact_rows(known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write `facts` as labels and texts."""
    names = [name for name in _LABELS if name in known] + [
        name for name in known if name not in _LABELS and name not in _ELSEWHERE
    ]
    shown = [name for name in names if known[name] or name not in _IF_NOT_ZERO]
    return [(_LABELS.get(name) or _label(name), _fact(name, known[name])) for name in shown]


def _label(name: str) -> str:
    """Return the name of a figure as words: `GPU energy` of `gpu_energy`."""
    text = name.replace("_", " ").capitalize()
    return re.sub("^Torch$", "PyTorch", re.sub("^([CG])pu", r"\1PU", re.sub(" id$", " ID", text)))


def is_virtual(known: Mapping[str, Any]) -> bool:
    """Return whether the seconds of a run are virtual ones."""
    return "cluster" in known


def _fact(name: str, value: Any) -> str:
    try:
        return _WRITTEN[name](value) if name in _WRITTEN else text(value)
    except (TypeError, KeyError, ValueError):
        return text(value)


def text(value: Any) -> str:
    """Write any JSON-able value for people."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{str(key).replace('_', ' ')} {text(each)}" for key, each in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts of the facts about the machine."""
    rows = dict(environment)
    if "process" in rows:
        rows["process_id"] = str(rows.pop("process"))
    return [(_label(name), text(value)) for name, value in rows.items()]


def class_rows(per_class: Any) -> list[dict[str, Any]]:
    """Return one row a class, from rows, or from figures (or one figure) by the name of the class."""
    if isinstance(per_class, dict):
        return [
            {"class": name, **(value if isinstance(value, dict) else {"accuracy": value})}
            for name, value in per_class.items()
        ]
    return [dict(row) for row in per_class] if _is_rows(per_class) else []


def _is_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(row, dict) for row in value)


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all columns, in the order in which they appear."""
    return list(dict.fromkeys(name for row in rows for name in row))
