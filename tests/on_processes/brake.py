"""A run that goes slowly until a test has done to it what it wanted, however late the test comes to that."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from polyrhythm.models.architectures.lenet5 import LeNet5
from polyrhythm.models.architectures.mlp import MLP

PAUSE_S = 0.1
"""Of a step: a hundred of them last longer than a busy machine lets a process wait for a core."""


@dataclass(frozen=True)
class Brake:
    """Lets steps take long, from one on, until it is released.

    Attributes:
        folder: where processes note that they have come so far; it need not be there yet.
        at: how many training steps each process takes before.
        pause_s: of each step from then on.
    """

    folder: Path
    at: int
    pause_s: float = PAUSE_S

    def on(self, model: nn.Module) -> nn.Module:
        """Gives the model, with the brake on its forward passes in training."""
        steps = count()

        def hold(module: nn.Module, _: Any) -> None:
            if module.training and next(steps) >= self.at and not self._released.exists():
                self.folder.mkdir(exist_ok=True)
                (self.folder / str(os.getpid())).touch()
                time.sleep(self.pause_s)

        model.register_forward_pre_hook(hold)
        return model

    def on_every_model(self) -> None:
        """Puts the brake on every `mlp` and `lenet5` that this process makes from now on."""
        self._on_every(MLP)
        self._on_every(LeNet5)

    def _on_every(self, kind: type[Any]) -> None:
        create = kind.create

        def braked(config: Any, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
            return self.on(create(config, classes, image_shape))

        kind.create = braked

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
