"""Progressive resizing: training begins with small images, which cost less, and ends with those of the full size.

Papers: J. Howard and others, fast.ai's entry to DAWNBench, 2018; M. Tan, Q. Le, "EfficientNetV2: smaller models and
faster training", ICML 2021, arXiv:2104.00298, section 4.

    side(epoch) = sizes[i],    i the first with epoch < until[i] * epochs;    the image size after the last

Tests see the full size. Networks must take images of every size, so they end in a global pooling.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from polyrhythm.errors import RequestError
from polyrhythm.training.quantities import Count, InnerFraction
from polyrhythm.training.schedule import SizeSchedule


class Progressive(SizeSchedule):
    """Keys of progressive resizing.

    Attributes:
        sizes: pixels a side, before the image size.
        until: end of each of them, as shares of the run, rising.
    """

    sizes: Annotated[tuple[Count, ...], Field(min_length=1)] = (128, 160)
    until: Annotated[tuple[InnerFraction, ...], Field(min_length=1)] = (0.4, 0.7)

    @model_validator(mode="after")
    def _ends_belong_to_sizes(self) -> Self:
        if len(self.sizes) != len(self.until):
            raise ValueError(f"{len(self.sizes)} sizes need as many ends in until, not {len(self.until)}")
        if list(self.until) != sorted(set(self.until)):
            raise ValueError("until must rise")
        return self

    def side(self, epoch: int, epochs: int, image_size: int) -> int:
        """Return the size of the stretch that the epoch is in.

        Raises:
            RequestError: a size is beyond the image size.
        """
        if max(self.sizes) > image_size:
            raise RequestError(
                f"size schedule {self}: {max(self.sizes)} pixels are more than the {image_size} of the image size, "
                "which is the last one: give smaller sizes, or a larger --image-size"
            )
        before_end = (size for size, end in zip(self.sizes, self.until, strict=True) if epoch < end * epochs)
        return next(before_end, image_size)
