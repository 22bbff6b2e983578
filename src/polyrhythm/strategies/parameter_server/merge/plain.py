"""Plain: every gradient is applied unchanged, however old it is."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.strategies.parameter_server.rules.merge_rule import MergeRule


class Plain(MergeRule):
    """Gradients unchanged."""

    keeps_gradients: ClassVar[bool] = True
