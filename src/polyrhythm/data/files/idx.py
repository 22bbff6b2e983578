"""The idx format, in which the MNIST family keeps its images and labels.

0 0 type dimensions | size of each dimension, 4 bytes, big-endian | the numbers, last dimension fastest
"""

from __future__ import annotations

import struct

import torch


def parse_idx(content: bytes) -> torch.Tensor:
    """Reads an idx file of unsigned bytes, as uint8 of the file's shape, in new memory.

    Raises:
        ValueError: it is not such a file, or its length is not what its head says.
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError("not an idx file of unsigned bytes")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError("an idx file cut short in its head")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != torch.Size(shape).numel():
        raise ValueError(f"an idx file of {len(content) - start} numbers whose head says {shape}")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)
