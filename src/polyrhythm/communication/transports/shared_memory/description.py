"""What a member of a collective is about to do, as one whole number, so that all can see whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from polyrhythm.errors import RequestError

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_DTYPE_BITS, _ROOT_BITS, _COUNT_BITS = 5, 12, 40
_OTHER = (1 << _DTYPE_BITS) - 1


class Operation(IntEnum):
    """Which collective."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    BARRIER = 5
    ALL_REDUCE_IN_PLACE = 6


def describe(operation: Operation, tensor: Tensor, root: int = 0) -> int:
    """Gives the number of a collective: operation, root, dtype and count of elements."""
    dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else _OTHER
    return ((operation << _ROOT_BITS | root) << _DTYPE_BITS | dtype) << _COUNT_BITS | tensor.numel()


def check_agreement(descriptions: Sequence[int], members: Sequence[int]) -> None:
    """Compares what the members are about to do.

    Args:
        descriptions: one a member.
        members: their ranks among all ranks of the run.

    Raises:
        RequestError: two of them differ; all members find the same two.
    """
    first = descriptions[0]
    for rank, description in zip(members, descriptions, strict=True):
        if description != first:
            raise RequestError(
                f"rank {members[0]} called {_in_words(first)}, rank {rank} {_in_words(description)}: call the same "
                "collective with the same dtype and size on all ranks"
            )


def _in_words(description: int) -> str:
    count = description & ((1 << _COUNT_BITS) - 1)
    dtype = description >> _COUNT_BITS & _OTHER
    root = description >> (_COUNT_BITS + _DTYPE_BITS) & ((1 << _ROOT_BITS) - 1)
    operation = Operation(description >> (_COUNT_BITS + _DTYPE_BITS + _ROOT_BITS))
    if operation is Operation.BARRIER:
        return "barrier"
    name = "another dtype" if dtype == _OTHER else str(_DTYPES[dtype]).removeprefix("torch.")
    source = f" from {root}" if operation is Operation.BROADCAST else ""
    return f"{operation.name.lower()}{source} with {count} elements of {name}"
