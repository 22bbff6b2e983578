"""What training minimises."""

from __future__ import annotations

from torch import nn

from polyrhythm.errors import RequestError


def make_loss(label_smoothing: float = 0.0) -> nn.Module:
    """Makes the mean cross-entropy of a batch, `(B, C)` logits and `(B,)` class numbers to `()`.

    Args:
        label_smoothing: share e of every target that is spread evenly over all C classes, the true one
            included: the loss is `(1 - e) CE(true class) + e mean over classes of CE(class)`, as in C.
            Szegedy and others, "Rethinking the Inception architecture for computer vision", CVPR 2016, arXiv
            1512.00567.

    Raises:
        RequestError: the share is not in [0, 1).
    """
    if not 0 <= label_smoothing < 1:
        raise RequestError(
            f"label smoothing {label_smoothing} is not a share: give at least 0 and less than 1"
        )
    return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
