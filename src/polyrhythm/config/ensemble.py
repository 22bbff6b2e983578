"""An ensemble's spec, `ensemble(members=4, each=local_sgd(steps=8))`: networks that learn side by side, not together.

Each member has an equal part of the workers, a seed of its own (the run's, the next one, …) and the strategy `each`,
which may be `stages("…")`, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.stages import Stages
from polyrhythm.errors import RequestError, unknown
from polyrhythm.specs import parse

_KEYS = ("members", "each")
_MOST = 1000
_FORM = "write ensemble(members=4), or ensemble(members=4, each=local_sgd(steps=8))"


@dataclass(frozen=True)
class Ensemble:
    """An ensemble.

    Attributes:
        members: number of networks.
        each: strategy of every member.
    """

    members: int = 4
    each: str = "synchronous"

    @classmethod
    def parse(cls, text: str) -> Ensemble | None:
        """Read a spec; return None if it is that of a single network.

        Raises:
            RequestError: it is one of an ensemble, and cannot be read.
        """
        if re.match(r"\s*ensemble\s*(\(|$)", text) is None:
            return None
        given = parse(text).arguments
        for key in given:
            if key not in _KEYS:
                raise unknown("key of strategy ensemble", key, _KEYS)
        members, each = given.get("members", cls.members), str(given.get("each", cls.each))
        if type(members) is not int or not 2 <= members <= _MOST:
            raise RequestError(f"an ensemble has 2 to {_MOST:,} members (given {members!r:.50}): {_FORM}")
        if cls.parse(each) is not None:
            raise RequestError(f"members of an ensemble are single networks (given {each:.100}): {_FORM}")
        return cls(members, each)

    def __str__(self) -> str:
        """Return the spec as text."""
        each = repr(self.each) if Stages.parse(self.each) is not None else self.each
        return f"ensemble(members={self.members}, each={each})"

    def member_configs(self, config: RunConfig) -> list[RunConfig]:
        """Return the configuration of each member's run, as a configuration of `train`.

        Args:
            config: configuration of the ensemble.

        Raises:
            RequestError: the workers cannot be shared out equally.
        """
        if config.workers % self.members:
            least = self.members * max(1, round(config.workers / self.members))
            raise RequestError(
                f"{config.workers} workers cannot be shared out equally among {self.members} members: give --workers "
                f"{least}"
            )
        workers = config.workers // self.members
        devices = config.device.split(",")
        return [
            config.model_copy(
                update={
                    "strategy": self.each,
                    "workers": workers,
                    "seed": config.seed + member,
                    "device": ",".join(devices[member * workers : (member + 1) * workers] or devices)
                    if len(devices) > 1
                    else config.device,
                    "distill": None,
                }
            )
            for member in range(self.members)
        ]


def refuse_distill(config: RunConfig) -> None:
    """Refuse `distill` where there is no ensemble.

    Raises:
        RequestError: it was given.
    """
    if config.distill is not None:
        raise RequestError(
            "--distill is the last stage of an ensemble: give --strategy 'ensemble(members=4)', or learn from runs "
            "that there are with --teacher"
        )
