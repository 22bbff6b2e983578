"""Common base of the choices of `--batch-norm`: the images that training statistics are computed over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from polyrhythm.specs import Config
from polyrhythm.training.joint_optimizer import Workers


class BatchNorm(Config, ABC):
    """Keys of a way to normalize batches; `prepare` makes a network follow it.

    Attributes:
        over_workers: whether statistics are those of all workers' images, which they exchange inside their passes.
    """

    over_workers: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Return a network that normalizes so in training; tests and saved weights are unaffected.

        Args:
            model: model, which may be changed. Its parameters and buffers stay the same objects, under the same names.

        Raises:
            RequestError: it has nothing to normalize.
        """

    def meet(self, model: nn.Module, workers: Workers) -> None:
        """Let a network that was prepared share its statistics with these workers from now on; if `over_workers`."""
