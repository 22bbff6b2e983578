"""The command line, with a perceptron whose forward pass in training takes a while, as on an accelerator.

    SOAK_PAUSE_S=0.01 python paced.py train --data digits --model mlp …

So a small network trains for long enough to meet faults, and several runs share the cores of one machine.
"""

from __future__ import annotations

import os
import time
from typing import Any

from torch import nn

from polyrhythm.cli.main import main
from polyrhythm.models.architectures.mlp import MLP

PAUSE_S = float(os.environ.get("SOAK_PAUSE_S", "0.01"))
_create = MLP.create


def _wait(network: nn.Module, _: Any) -> None:
    if network.training:
        time.sleep(PAUSE_S)


def _paced(self: MLP, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    network = _create(self, classes, image_shape)
    network.register_forward_pre_hook(_wait)
    return network


if __name__ == "__main__":
    MLP.create = _paced  # type: ignore[method-assign]
    main()
