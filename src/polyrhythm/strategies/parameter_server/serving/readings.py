"""What every pusher has read last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyrhythm.strategies.parameter_server.serving.shard import Pushed


class Readings:
    """The version that each pusher of one server has read last. Pushers are numbered from 0.

    Args:
        pushers: how many there are.
        remembers: whether what was read is kept, and not its version alone.

    Attributes:
        versions: that pushers have read, and since then one more for each gradient of their own that was applied.
        values: each `(n,)`, where they are kept.
    """

    def __init__(self, pushers: int, *, remembers: bool) -> None:
        self.versions = [0] * pushers
        self.values: list[Tensor | None] = [None] * pushers
        self._remembers = remembers

    def note(self, pusher: int, version: int, values: Tensor) -> None:
        """A pusher is answered with these parameters, which must not change."""
        self.versions[pusher] = version
        if self._remembers:
            self.values[pusher] = values

    def count(self, applied: Sequence[Pushed]) -> None:
        """An update has been made of these gradients."""
        for entry in applied:
            self.versions[entry.pusher] += entry.message.weight > 0

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives all that has been read; a checkpoint does without, since resumed pushers read anew."""
        read = {f"read.{pusher}": values for pusher, values in enumerate(self.values) if values is not None}
        return read, {"versions": list(self.versions)}

    def load_exact_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `exact_state` gave."""
        self.versions = list(facts["versions"])
        self.values = [tensors.get(f"read.{pusher}") for pusher in range(len(self.versions))]

    def forget(self, pusher: int) -> None:
        """A pusher is gone."""
        self.versions[pusher] = 0
        self.values[pusher] = None
