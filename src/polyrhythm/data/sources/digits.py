"""Digits: 1,797 handwritten digits of 8 by 8 grey pixels, which scikit-learn brings along.

Paper: E. Alpaydin, C. Kaynak, "Cascading Classifiers", Kybernetika 34(4), 1998 (the UCI set "Optical
Recognition of Handwritten Digits", of which this is the test part).
"""

from __future__ import annotations

import torch

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.hold_out import held_out
from polyrhythm.specs import Config

LARGEST = 16.0  # pixels count the dots of a 4 by 4 block
MEAN = 0.305  # of pixels from 0 to 1


class Digits(Config):
    """Handwritten digits; a fixed fifth of every class is held out for testing."""

    def load(self) -> Dataset:
        """Reads it; pixels become about zero in the mean, and span one."""
        # Imported here because it takes a second, and only this data set needs it.
        from sklearn.datasets import load_digits

        raw = load_digits()
        images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / LARGEST - MEAN
        labels = torch.tensor(raw.target)
        train, test = (TensorSplit(images[part], labels[part]) for part in held_out(labels))
        black, white = (-MEAN,), (1 - MEAN,)
        return Dataset("digits", train, test, tuple("0123456789"), (1, 8, 8), 30, black=black, white=white)
