"""When a replica starts: at its model's first use in training.

Replicas become equal when they start, and servers get their parameters then. So the start waits for as long as it
can, and weights and states that are loaded after `distribute` still count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from polyrhythm.roles.replica import Replica


class Beginning:
    """Starts a replica once.

    Args:
        replica: all workers' must start at the same place of their programs.
        begin: starts it with those of the others, at a step; gives the step where it has started.

    Attributes:
        step: where the replica starts; then where it has started.
        past: whether it has started.
    """

    def __init__(self, replica: Replica, begin: Callable[[int], int]) -> None:
        self.step = 0
        self.past = False
        self._begin = begin
        used = [module for module in replica.model.modules() if list(module.parameters(recurse=False))]
        self._hooks = [module.register_forward_pre_hook(self._on_use) for module in used]

    def now(self) -> bool:
        """Starts the replica, unless it has started; gives whether it has done so now."""
        if self.past:
            return False
        self.past = True
        for hook in self._hooks:
            hook.remove()
        self.step = self._begin(self.step)
        return True

    def in_training(self) -> None:
        """Starts the replica if this is no evaluation, which a single worker may do on its own."""
        if torch.is_grad_enabled():
            self.now()

    def _on_use(self, module: nn.Module, inputs: object) -> None:
        if module.training:
            self.in_training()
