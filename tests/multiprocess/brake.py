"""A run that goes slowly until a test has done to it what it wanted, however late the test comes to that."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from polyrhythm.models.architectures.mlp import MLP

PAUSE_S = 0.1
"""Of a step: a hundred of them last longer than a busy machine lets a process wait for a core."""


@dataclass(frozen=True)
class Brake:
    """Lets steps take long, from one on, until it is released.

    Attributes:
        folder: where processes note that they have come so far; it need not be there yet.
        at: how many training steps each process takes before.
    """

    folder: Path
    at: int

    def on(self, model: nn.Module) -> nn.Module:
        """Gives the model, with the brake on its forward passes in training."""
        steps = count()

        def hold(module: nn.Module, _: Any) -> None:
            if module.training and next(steps) >= self.at and not self._released.exists():
                self.folder.mkdir(exist_ok=True)
                (self.folder / str(os.getpid())).touch()
                time.sleep(PAUSE_S)

        model.register_forward_pre_hook(hold)
        return model

    def on_every_mlp(self) -> None:
        """Puts the brake on every `mlp` that this process makes from now on."""
        create = MLP.create

        def braked(config: MLP, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
            return self.on(create(config, classes, image_shape))

        MLP.create = braked  # type: ignore[method-assign]

    def reached_by(self, processes: list[int]) -> bool:
        """Whether these have come so far."""
        return all((self.folder / str(process)).exists() for process in processes)

    def release(self) -> None:
        """Lets all go on as quickly as they can."""
        self.folder.mkdir(exist_ok=True)
        self._released.touch()

    @property
    def _released(self) -> Path:
        return self.folder / "released"
