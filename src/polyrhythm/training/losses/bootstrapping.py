"""Bootstrapping: a label counts in part, and in part the network's own opinion, so that wrong labels harm less.

S. Reed and others, "Training deep neural networks on noisy labels with bootstrapping", ICLR 2015 workshop,
arXiv:1412.6596.

    soft:  l_i = -sum_k (b t_ik + (1 - b) p_ik) log p_ik
    hard:  l_i = -sum_k (b t_ik + (1 - b) [k = argmax p_i]) log p_ik

p is softmax(z), t the target, b is `beta`. The opinion is a target: no gradient runs through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch.nn import functional

from polyrhythm.training.loss import Loss, Targets

if TYPE_CHECKING:
    from torch import Tensor


class Bootstrapping(Loss):
    """The loss of labels that may be wrong.

    Attributes:
        beta: weight of the label; 1 is the cross-entropy. The paper's 0.95 is for `soft`, its 0.8 for `hard`.
        opinion: the network's probabilities (`soft`) or its likeliest class (`hard`).
    """

    beta: float = Field(0.8, ge=0, le=1)
    opinion: Literal["soft", "hard"] = "hard"

    def of(self, logits: Tensor, labels: Tensor, targets: Targets) -> Tensor:
        logarithms = logits.log_softmax(1)
        if self.opinion == "hard":
            own = functional.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
        else:
            own = logarithms.detach().exp()
        opinion = -(own * logarithms).sum(1)
        return self.beta * targets.cross_entropy(logits, labels) + (1 - self.beta) * opinion
