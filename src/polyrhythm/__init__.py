"""Polyrhythm trains image classifiers on several workers with synchronous, asynchronous and mixed algorithms.

import polyrhythm

run = polyrhythm.train(data="digits", model="mlp", strategy="parameter_server(servers=2)", workers=3)
print(run.figures["test_top1"])
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyrhythm.api.analyze import analyze
    from polyrhythm.api.augment import augment
    from polyrhythm.api.average import average
    from polyrhythm.api.calibrate import calibrate
    from polyrhythm.api.compare import compare
    from polyrhythm.api.evaluate import evaluate
    from polyrhythm.api.export import export
    from polyrhythm.api.join import Group, join
    from polyrhythm.api.observed_run import Run
    from polyrhythm.api.plan import plan
    from polyrhythm.api.predict import predict
    from polyrhythm.api.profile import profile
    from polyrhythm.api.replay import replay
    from polyrhythm.api.robustness import robustness
    from polyrhythm.api.simulate import simulate
    from polyrhythm.api.strategies import strategies
    from polyrhythm.api.submit import submit
    from polyrhythm.api.train import train
    from polyrhythm.api.tune import tune
    from polyrhythm.api.why import why
    from polyrhythm.errors import PolyrhythmError, RequestError, RunError

__all__ = [
    "Group",
    "PolyrhythmError",
    "RequestError",
    "Run",
    "RunError",
    "analyze",
    "augment",
    "average",
    "calibrate",
    "compare",
    "evaluate",
    "export",
    "join",
    "plan",
    "predict",
    "profile",
    "replay",
    "robustness",
    "simulate",
    "strategies",
    "submit",
    "train",
    "tune",
    "why",
]

HOMES = {
    "analyze": "polyrhythm.api.analyze",
    "augment": "polyrhythm.api.augment",
    "average": "polyrhythm.api.average",
    "calibrate": "polyrhythm.api.calibrate",
    "compare": "polyrhythm.api.compare",
    "evaluate": "polyrhythm.api.evaluate",
    "export": "polyrhythm.api.export",
    "plan": "polyrhythm.api.plan",
    "predict": "polyrhythm.api.predict",
    "Group": "polyrhythm.api.join",
    "join": "polyrhythm.api.join",
    "profile": "polyrhythm.api.profile",
    "replay": "polyrhythm.api.replay",
    "robustness": "polyrhythm.api.robustness",
    "simulate": "polyrhythm.api.simulate",
    "strategies": "polyrhythm.api.strategies",
    "submit": "polyrhythm.api.submit",
    "train": "polyrhythm.api.train",
    "tune": "polyrhythm.api.tune",
    "why": "polyrhythm.api.why",
    "Run": "polyrhythm.api.observed_run",
    "PolyrhythmError": "polyrhythm.errors",
    "RequestError": "polyrhythm.errors",
    "RunError": "polyrhythm.errors",
}
"""The module of every public name, which is imported when the name is first used."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `polyrhythm --help` must not wait for PyTorch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("polyrhythm")
    if name not in HOMES:
        raise AttributeError(f"module 'polyrhythm' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


class _Package(ModuleType):
    """Keep `polyrhythm.strategies` the function once the folder of that name has been imported, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
