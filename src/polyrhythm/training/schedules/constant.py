"""A learning rate that stays as it is, after warm-up and linear scaling."""

from __future__ import annotations

from polyrhythm.training.schedule import Schedule


class Constant(Schedule):
    """Keys of the constant schedule: those that all have."""

    def decay(self, step: float, warmup_steps: int, total_steps: float) -> float:
        return 1.0
