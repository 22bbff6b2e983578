"""What choices of `--batch-norm` have in common: of which pictures training takes the statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from polyrhythm.specs import Config


class BatchNorm(Config, ABC):
    """Keys of a way to normalise batches; `prepare` makes a network follow it."""

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Return a network that normalises so in training; in tests, and in what it saves, it is as it was.

        Args:
            model: may be changed. Its parameters and buffers stay the same objects, under the same names.

        Raises:
            RequestError: it has nothing to normalise.
        """
