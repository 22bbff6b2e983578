"""How large a model's buckets are, and which share of a step's time passes until each is ready."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from polyrhythm.models.work import work_of_parameters
from polyrhythm.training.flat_parameters import FlatParameters


@dataclass(frozen=True)
class ModelSizes:
    """All that moving a model's gradients depends on.

    Attributes:
        buckets: trained numbers in each bucket, in the order in which the backward pass fills them.
        shares: of a pass's time that each bucket's layers take; they add up to 1.
        dtype: of the parameters.
        head: features that go into the fully connected layers at its end, and the neurons of each; empty where nobody
            cuts them.
    """

    buckets: tuple[int, ...]
    shares: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    head: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.buckets) == len(self.shares) > 0, "every bucket has a share"
        assert min(self.buckets) > 0, "a bucket holds at least one number"

    @property
    def parameters(self) -> int:
        """Trained numbers in all."""
        return sum(self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them: what the papers call M."""
        return self.parameters * self.dtype.itemsize


def sizes_of(
    model: nn.Module, image_shape: tuple[int, int, int], bucket_bytes: int | None = None
) -> ModelSizes:
    """Measures a model that no one trains.

    Args:
        model: its parameters become views of one vector; best on the meta device, where that costs no memory.
        image_shape: (C, H, W) of a picture.
        bucket_bytes: smallest size of a bucket, if it is not the default.

    Raises:
        RequestError: it has nothing to train.
    """
    flat = FlatParameters(model) if bucket_bytes is None else FlatParameters(model, bucket_bytes)
    return ModelSizes(tuple(_numbers(flat)), time_shares(model, flat, image_shape), flat.vector.dtype)


def time_shares(
    model: nn.Module, flat: FlatParameters, image_shape: tuple[int, int, int]
) -> tuple[float, ...]:
    """Gives each bucket's share of a pass's time: that of the arithmetic in the layers whose parameters it holds.

    See `work_of_parameters` for what counts. Where nothing does, it is the bucket's share of the parameters.

    Args:
        model: whose parameters are `flat`'s.
        flat: has the buckets.
        image_shape: (C, H, W) of a picture.
    """
    if len(flat.buckets) == 1:
        return (1.0,)
    work = work_of_parameters(model, image_shape)
    spent = [
        sum(work[flat.views[position].name] for position in bucket.parameters) for bucket in flat.buckets
    ]
    return _normalised(spent if sum(spent) > 0 else _numbers(flat))


def shares_of_numbers(model: nn.Module, flat: FlatParameters) -> tuple[float, ...]:
    """Gives each bucket's share of the parameters."""
    return _normalised(_numbers(flat))


def _numbers(flat: FlatParameters) -> list[int]:
    return [min(bucket.stop, flat.size) - bucket.start for bucket in flat.buckets]


def _normalised(parts: list[float] | list[int]) -> tuple[float, ...]:
    whole = sum(parts)
    return tuple(part / whole for part in parts)
