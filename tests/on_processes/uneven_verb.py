"""`polyrhythm` with workers of which one computes five times more slowly, however busy the machine is.

uneven_verb.py FOLDER VERB …   (FOLDER: of notes, which is made)

They sleep for each image, and measure that alone: how long a process waits for a busy processor says nothing of it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

FAST_S, SLOW_S = 0.0002, 0.001
"""Of an image."""


def on_every_mlp(folder: Path) -> None:
    """Let every `mlp` that this process and its children make sleep for each image; one of them for longer."""
    from polyrhythm.models.architectures.mlp import MLP
    from polyrhythm.roles.balance import Balancer

    create, note = MLP.create, Balancer.note
    paces = {os.getpid(): 0.0}  # the launcher tries the network out, too

    def pace() -> float:
        own = os.getpid()
        if own not in paces:
            try:
                (folder / "slow").touch(exist_ok=False)
                paces[own] = SLOW_S
            except FileExistsError:
                paces[own] = FAST_S
        return paces[own]

    def uneven(config: Any, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        model = create(config, classes, image_shape)

        def take_long(module: nn.Module, inputs: Any) -> None:
            if module.training:
                time.sleep(pace() * len(inputs[0]))

        model.register_forward_pre_hook(take_long)
        return model

    def note_sleep(balancer: Balancer, images: int, seconds: float) -> None:
        assert seconds >= pace() * images  # what was measured has it in it
        note(balancer, images, pace() * images)

    MLP.create = uneven  # type: ignore[method-assign]
    Balancer.note = note_sleep  # type: ignore[method-assign]


if __name__ == "__main__":
    from polyrhythm.cli.main import main

    notes = Path(sys.argv[1])
    notes.mkdir()
    on_every_mlp(notes)
    main(sys.argv[2:])
