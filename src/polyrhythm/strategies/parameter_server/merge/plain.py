"""Plain: every gradient is applied as it came, however old it is."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.parameter_server.rules.aggregator import MergeRule


class Plain(MergeRule):
    """Gradients as they come."""

    keeps_gradients: ClassVar[bool] = True
