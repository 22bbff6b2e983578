"""The run's final model, which all workers get, so that any of them may save it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_tensors
from polyrhythm.roles.replica import Replica

_VECTOR, _BUFFER = "vector", "buffer."


@dataclass(frozen=True)
class FinalModel:
    """Parameters and buffers.

    Attributes:
        vector: `(size,)`, the parameters.
        buffers: by name.
    """

    vector: Tensor
    buffers: dict[str, Tensor]

    @classmethod
    def made_of(cls, vector: Tensor, buffers: Sequence[dict[str, Tensor]]) -> FinalModel:
        """Makes it of worker 0's parameters.

        Batch-norm statistics, which each worker has kept on its own, are averaged; buffers that are equal everywhere
        keep their bits, and counters are worker 0's.

        Args:
            vector: `(size,)`, worker 0's.
            buffers: of all workers, worker 0's first.
        """
        first = buffers[0]
        means = {name: _mean([each[name] for each in buffers]) for name in first}
        return cls(vector.detach().cpu(), means)

    @classmethod
    def of(cls, message: Message) -> FinalModel:
        """Reads what `message` wrote."""
        assert message.tensor is not None, "a model has parameters"
        tensors, _ = unpack_tensors(message.tensor)
        buffers = {
            name.removeprefix(_BUFFER): value for name, value in tensors.items() if name.startswith(_BUFFER)
        }
        return cls(tensors[_VECTOR], buffers)

    def message(self, tag: int) -> Message:
        """Packs it to be sent, as the word that lets a worker leave."""
        named = {_VECTOR: self.vector} | {_BUFFER + name: value for name, value in self.buffers.items()}
        return Message(Kind.LEAVE, pack_tensors(named, {}), tag=tag)

    def give(self, replica: Replica) -> None:
        """Overwrites the model of a replica."""
        replica.flat.vector.copy_(self.vector)
        for name, value in replica.buffers.items():
            value.copy_(self.buffers[name])


def _mean(values: list[Tensor]) -> Tensor:
    """Averages values that are no whole numbers; not the plain mean, which would not give equal ones back."""
    first = values[0]
    if not first.is_floating_point():
        return first
    away = [torch.where(value == first, torch.zeros_like(value), value - first) for value in values[1:]]
    return first + sum(away, torch.zeros_like(first)) / len(values)
