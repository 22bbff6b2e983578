"""Writer of the safetensors format as a stream.

The library's own writer either builds the whole file in memory or writes it under a random name that only its owner may
read, and it refuses tensors that share memory. Files of a large model should do none of these. The format is small:
https://github.com/huggingface/safetensors#format

    [8 bytes: length of the header][header: JSON, padded with spaces to 8 bytes][tensor][tensor]...
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and texts.

    Args:
        file: file to write to, from its current position on.
        tensors: contiguous ones on the CPU; they may share memory.
        metadata: texts for the header.

    Raises:
        ValueError: the format has no code for a tensor's dtype.
    """
    # as the library does: widest numbers first, so that each tensor starts at a multiple of its number's size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise ValueError(f"cannot store {name}: safetensors has no {tensor.dtype}")
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in names:
        file.write(raw_bytes(tensors[name]))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, without copying it."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
