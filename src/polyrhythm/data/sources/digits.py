"""Digits: 1,797 handwritten digits of 8 by 8 gray pixels, which scikit-learn contains.

Paper: E. Alpaydin, C. Kaynak, "Cascading Classifiers", Kybernetika 34(4), 1998 (this is the test part of the
UCI set "Optical Recognition of Handwritten Digits").
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.dealing import held_out
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

LARGEST = 16.0  # pixels count the dots of a 4 by 4 block
MEAN = 0.305  # of pixels from 0 to 1


class Digits(Config):
    """Handwritten digits; a fixed fifth of every class is held out for testing."""

    def load(self) -> Dataset:
        """Return the data; pixels have a mean near zero and a range of one."""
        table = np.loadtxt(_file(), delimiter=",", dtype=np.float32)
        images = torch.from_numpy(table[:, :-1]).reshape(-1, 1, 8, 8) / LARGEST - MEAN
        labels = torch.from_numpy(table[:, -1].astype(np.int64))
        train, test = (TensorSplit(images[part], labels[part]) for part in held_out(labels))
        black, white = (-MEAN,), (1 - MEAN,)
        return Dataset("digits", train, test, tuple("0123456789"), (1, 8, 8), 30, black=black, white=white)


def _file() -> Path:
    """Return the file of the table; importing scikit-learn takes longer than all else before the first step."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise RequestError("the data set digits is a file of scikit-learn: pip install 'polyrhythm[data]'")
    return Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
