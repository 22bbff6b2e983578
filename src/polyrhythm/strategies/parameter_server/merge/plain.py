"""Plain: every gradient is applied as it came, however old it is."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.parameter_server.rules.merge_rule import Merger, MergeRule


class Plain(MergeRule):
    """Gradients as they come."""

    keeps_gradients: ClassVar[bool] = True

    def merger(self) -> Merger:
        """Makes one server's merger."""
        return Merger()
