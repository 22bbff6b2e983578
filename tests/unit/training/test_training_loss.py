"""The loss against numpy."""

import numpy as np
import pytest
import torch

from polyrhythm.errors import RequestError
from polyrhythm.training.loss import make_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_equals_the_written_rule(smoothing):
    logits = np.random.default_rng(0).normal(size=(5, 4))
    labels = np.array([0, 3, 1, 1, 2])
    per_class = np.log(np.exp(logits).sum(1, keepdims=True)) - logits
    expected = (1 - smoothing) * per_class[np.arange(5), labels].mean() + smoothing * per_class.mean()
    loss = make_loss(smoothing)(torch.tensor(logits), torch.tensor(labels))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_refuses_what_is_no_share(smoothing):
    with pytest.raises(RequestError, match="label smoothing"):
        make_loss(smoothing)
