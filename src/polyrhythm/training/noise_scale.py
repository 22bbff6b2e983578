"""The gradient noise scale: from which size on larger batches hardly make steps better.

Paper: S. McCandlish, J. Kaplan, D. Amodei, "An empirical model of large-batch training", 2018, arXiv 1812.06162,
appendix A.1.

    E |g_b|^2 = |G|^2 + S / b             g_b: the mean gradient of b images, G: of all there are

    |G|^2 ~ (B |g_B|^2 - b |g_b|^2) / (B - b)
    S     ~ (|g_b|^2 - |g_B|^2) / (1/b - 1/B)         trace of the covariance of one image's gradient
    scale = S / |G|^2                                 images

A step with B = scale images gains half of what one with all images would; with many more, hardly anything is gained.
Both gradients are there anyway where workers average theirs: b is one worker's batch, B that of all.

Either estimate alone is without bias, their ratio is not. So each is averaged over many steps before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """Sums over the steps in which the two gradients were compared.

    Attributes:
        measured: number of compared steps.
        noise: sum of the estimates of S.
        signal: sum of those of |G|^2.
        images: images of all workers in the latest of them.
    """

    measured: int = 0
    noise: float = 0.0
    signal: float = 0.0
    images: int = 0

    @property
    def scale(self) -> float | None:
        """The noise scale in images; None where noise hides the gradient, or nothing was measured."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None

    def plus(self, other: GradientNoise) -> GradientNoise:
        """Return the sums of both, the other being the later."""
        return GradientNoise(
            self.measured + other.measured,
            self.noise + other.noise,
            self.signal + other.signal,
            other.images or self.images,
        )


def compared(own_square: float, own: int, mean_square: float, images: int) -> GradientNoise:
    """Return the result of one step.

    Args:
        own_square: |g_b|^2.
        own: b.
        mean_square: |g_B|^2.
        images: B, more than b.
    """
    noise = (own_square - mean_square) / (1 / own - 1 / images)
    signal = (images * mean_square - own * own_square) / (images - own)
    return GradientNoise(1, noise, signal, images)


class NoiseMeter:
    """Compares a worker's gradients with the mean of all, now and then: each time costs two passes over a gradient.

    Attributes:
        every: interval of compared steps, in steps.
        first: the first of them.
    """

    every, first = 16, 4

    def __init__(self) -> None:
        self._found = GradientNoise()
        self._own: tuple[float, int] | None = None

    def note_own(self, gradients: Tensor, images: int) -> None:
        """Store this worker's mean gradient, `(n,)`, over `images` images."""
        self._own = float(gradients.square().sum()), images

    def note_mean(self, gradients: Tensor, images: int) -> None:
        """Note the mean of all workers, `(n,)`, if this worker's own gradient was noted, and is not all there is."""
        own, self._own = self._own, None
        if own is not None and 0 < own[1] < images:
            mean_square = float(gradients.square().sum())
            self._found = self._found.plus(compared(*own, mean_square, images))

    def taken(self) -> GradientNoise | None:
        """Return the measurements since the last call; None if there are none."""
        found, self._found = self._found, GradientNoise()
        return found if found.measured else None
