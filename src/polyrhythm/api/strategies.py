"""The list of strategies, for the verb `strategies`."""

from __future__ import annotations

import inspect
from typing import Any

from polyrhythm.specs import build, choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.strategy import Strategy


def strategies(name: str | None = None) -> list[dict[str, Any]]:
    """Describe all strategies, or one.

    Returns:
        For each: `name`, `family`, `paper`, `cited_as`, `year`, `summary`, `rule` (its module's text),
        `bytes_per_step`, `staleness`, `use_it`, `when_a_worker_dies` and `keys` with their defaults.

    Raises:
        RequestError: no such strategy.
    """
    known = {key: kind for family in FAMILIES for key, kind in choices(family).items()}
    kinds = known.values() if name is None else [type(build("strategy", name, *FAMILIES))]
    return [_described(kind) for kind in kinds]


_WORKERS = 4


def _after_loss(policy: FaultPolicy) -> str:
    """Return what happens when a worker fails, for users."""
    if policy.regroups:
        return "the others regroup and continue from what all of them have; a replacement joins them"
    if policy.regroups_apart:
        return "its group regroups and continues, and a replacement joins it; other groups are not affected"
    if not policy.continues:
        return "the run stops and names it; `--resume` continues from the last checkpoint"
    most = f"up to {policy.spares} of {_WORKERS} may be missing at once: "
    some = most if policy.spares < _WORKERS - 1 else ""
    return f"{some}the others continue, and a replacement takes over the remaining steps"


def _described(kind: Any) -> dict[str, Any]:
    assert issubclass(kind, Strategy)
    made = kind()
    return {
        "name": made.name,
        "family": kind.__module__.rpartition(".")[0].rpartition(".")[2],
        "paper": str(kind.paper),
        "cited_as": kind.paper.short,
        "year": kind.paper.year,
        "summary": (inspect.getdoc(kind) or "").splitlines()[0],
        "rule": (inspect.getdoc(inspect.getmodule(kind)) or "").strip(),
        "bytes_per_step": kind.facts.bytes_per_step,
        "staleness": kind.facts.staleness,
        "use_it": kind.facts.use_it,
        "when_a_worker_dies": _after_loss(made.faults(_WORKERS)),
        "keys": {key: str(getattr(made, key)) for key in kind.model_fields},
    }
