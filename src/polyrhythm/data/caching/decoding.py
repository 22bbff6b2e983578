"""What is remembered of an image: its decoded bytes, which become numbers a batch at a time.

    file ── decode, scale ──▶ bytes ── normalise ──▶ numbers
                               │
                     kept here: on disk (`decoded_files`), in memory or on the GPU (`cached_split`)

Bytes are a quarter of the numbers, and what normalises them takes a hundredth of the time that decoding takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Decoding(Protocol):
    """A split whose images are decoded first, always to the same, and made numbers of afterwards."""

    def __len__(self) -> int:
        """Gives the number of images."""

    @property
    def labels(self) -> Tensor:
        """The classes of all images, (n,) int64."""

    def decoded(self, indices: Tensor) -> Tensor:
        """Gives what `indices`, (B,) int64, are decoded to: (B, …), all of one shape and dtype."""

    def normalised(self, decoded: Tensor) -> Tensor:
        """Gives (B, C, H, W) float32 in new memory, on the device of what was decoded."""
