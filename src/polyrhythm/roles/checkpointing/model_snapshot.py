"""A copy of the model that is tested, at one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.strategies.state import below, prefixed


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """Copy of the model that is tested.

    Attributes:
        epoch: number of finished epochs.
        step: steps done by the coordinator.
        taken_s: time of the copy, in seconds since training started.
        parameters: `(size,)`, the parameters.
        buffers: buffers by name.
    """

    epoch: int
    step: int
    taken_s: float
    parameters: Tensor
    buffers: dict[str, Tensor]

    @property
    def name(self) -> str:
        """Its step and epoch, for people."""
        return f"step {self.step}" + (f" (epoch {self.epoch})" if self.epoch else "")

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {"parameters": self.parameters} | prefixed("buffers.", self.buffers)

    @classmethod
    def of(cls, epoch: int, step: int, tensors: Mapping[str, Tensor]) -> ModelSnapshot:
        """Rebuild a snapshot of an earlier session from `tensors`."""
        return cls(epoch, step, 0.0, tensors["parameters"], below("buffers.", dict(tensors)))

    def check_fits(self, size: int, buffers: Mapping[str, Tensor]) -> None:
        """Check that the model has these parameters and buffers.

        Raises:
            ValueError: it has others.
        """
        if self.parameters.shape != (size,):
            raise ValueError(f"an untested model has {self.parameters.numel():,} parameters, not {size:,}")
        if _kinds(self.buffers.items()) != _kinds(buffers.items()):
            raise ValueError("an untested model has other buffers")


def _kinds(named: Iterable[tuple[str, Tensor]]) -> set[tuple[str, tuple[int, ...], str]]:
    return {(name, tuple(value.shape), str(value.dtype)) for name, value in named}
