"""A strategy of strategies: `stages("synchronous until 0.1; parameter_server(servers=1)")`.

Each stage ends at the end of an epoch, where the next strategy continues with parameters, optimizer state, schedule
and counts. `until` is followed by a share of the run's epochs (below 1), by a number of whole epochs (`until 3
epochs`), or by the target of a test (`until top1=0.8`); the last stage has none. If a target is not reached, its stage
is the last.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.target import Target
from polyrhythm.specs import split_outside

_FORM = 'write stages("synchronous until 0.1; parameter_server(servers=1)")'


@dataclass(frozen=True)
class Stage:
    """A strategy for a part of a run.

    Attributes:
        strategy: spec of the strategy.
        until: the share of the run's epochs after which it ends, if below 1; else how many epochs; 0: with the run.
        target: target of a test that ends it, instead of `until`; None: none.
    """

    strategy: str
    until: float = 0.0
    target: Target | None = None


@dataclass(frozen=True)
class Stages:
    """The strategies of a run, one after the other."""

    stages: tuple[Stage, ...]

    @classmethod
    def parse(cls, text: str) -> Stages | None:
        """Read a spec; return None if it is that of a single strategy.

        Raises:
            RequestError: it is one of stages, and cannot be read.
        """
        found = re.fullmatch(r"\s*stages\s*\((.*)\)\s*", text, re.DOTALL)
        if found is None:
            return None
        inner = found[1].strip()
        if inner[:1] in ("'", '"'):
            try:
                inner = str(ast.literal_eval(inner))
            except (SyntaxError, ValueError):
                raise RequestError(f"cannot read {text!r:.200}: {_FORM}") from None
        parts = split_outside(inner, ";")
        if len(parts) < 2:
            raise RequestError(
                f"stages are at least two strategies with ; between them (given {inner!r:.100}): {_FORM}"
            )
        stages = [_stage(part, last=part is parts[-1]) for part in parts]
        return cls(tuple(stages))

    def __str__(self) -> str:
        """Return the spec as text."""
        parts = []
        for stage in self.stages:
            until = f" until {stage.until:g}" if stage.until else ""
            until = until if stage.target is None else f" until {stage.target.metric}={stage.target.value:g}"
            parts.append(f"{stage.strategy}{until}{' epochs' if stage.until >= 1 else ''}")
        return f'stages("{"; ".join(parts)}")'

    def ends(self, epochs: int) -> list[int | None]:
        """Return the number of finished epochs at the end of each stage; None where a test decides.

        Args:
            epochs: epochs of the run.

        Raises:
            RequestError: a stage would be without an epoch.
        """
        found: list[int | None] = []
        before = 0
        for stage in self.stages:
            if stage.target is not None:
                found.append(None)
                continue
            end = epochs if not stage.until else round(stage.until * (epochs if stage.until < 1 else 1))
            if end <= before or end > epochs or (stage.until and end == epochs):
                at = (
                    f"{stage.until:g} of {epochs} epochs"
                    if stage.until < 1
                    else f"{stage.until:g} epochs of {epochs}"
                )
                raise RequestError(
                    f"stages change at the end of an epoch: {stage.strategy} until {at} ends after {end}, which leaves "
                    "a stage without one; give more --epochs, or other shares"
                )
            found.append(end)
            before = end
        return found


def _stage(text: str, *, last: bool) -> Stage:
    strategy, word, until = text.rpartition(" until ")
    if not word:
        if not last:
            raise RequestError(f"only the last stage has no end (given {text!r:.100}): {_FORM}")
        return Stage(text.strip())
    if last:
        raise RequestError(
            f"the last stage lasts to the end of the run: leave {word.strip()} {until.strip()} out"
        )
    if "=" in until:
        return Stage(strategy.strip(), target=Target.parse(until.strip()))
    found = re.fullmatch(r"\s*(?:([0-9]+)\s+epochs?|(0?\.[0-9]+))\s*", until)
    if found is None:
        raise RequestError(
            f"cannot read until {until.strip()!r:.40}: write a share of the run, as in until 0.1, until 3 epochs, or "
            "until top1=0.8"
        )
    value = float(found[1] or found[2])
    if value <= 0:
        raise RequestError(f"until {until.strip()} leaves {strategy.strip()} no epoch")
    return Stage(strategy.strip(), value)
