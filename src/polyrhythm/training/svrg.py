"""SVRG: gradients with a control variate, the gradient of the same batch at an anchor with a known full gradient.

Johnson, Zhang, "Accelerating stochastic gradient descent using predictive variance reduction", NIPS 2013; distributed:
De, Goldstein, "Efficient distributed SGD with variance reduction", ICDM 2016, arXiv 1512.01708; asynchronous: Reddi,
Hefny, Sra, Póczos, Smola, "On variance reduction in stochastic gradient descent and its asynchronous variants", NIPS
2015, arXiv 1506.06840.

    a_i <- w,  m_i <- mean of g_i(a_i) over batches of the epoch       at the start of an epoch
    v_i =  g_i(w) - g_i(a_i) + m_i                                     in place of g_i(w), in each step

The strategy and the optimizer receive v_i as the gradient of worker i. Both gradients of a step are of the same images
with the same augmentation, dropout and batch-norm statistics of the batch. The memory is that of two more models.

    own    m_i is over the batches of worker i.     An epoch costs three passes over the images instead of one.
    all    m_i is over those of all N workers.      It costs N + 2 passes.

Synchronous workers have one anchor, since they have one model, and the mean of their m_i is the full gradient over
all images: `own` is distributed SVRG, without a message of its own. Asynchronous workers have an anchor each. With
`own` the variance between their shares of the images remains, with `all` none does. (Reddi et al. stop all workers at
each anchor; they have one, and compute its gradient jointly.)

Where another worker fails or is slow, a worker gets another share of the images within an epoch, and takes an anchor at
once. Departures: an anchor lasts one epoch, in which each image is drawn once and not with replacement; it is the
latest model, option I of the first paper; any optimizer replaces plain SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyrhythm.errors import RequestError


@dataclass(frozen=True)
class Anchor:
    """Point with a known full gradient.

    Attributes:
        share: name of the images that the full gradient is the mean of.
        vector: parameters, `(n,)`.
        gradient: mean gradient there, `(n,)`.
    """

    share: str
    vector: Tensor
    gradient: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, on the CPU, for a checkpoint."""
        return {"vector": self.vector.cpu(), "gradient": self.gradient.cpu()}

    @classmethod
    def restored(cls, share: str, tensors: dict[str, Tensor], like: Tensor) -> Anchor:
        """Return an anchor with the tensors of `tensors()`, on the device of `like`, `(n,)`.

        Raises:
            RequestError: they are of another model.
        """
        own = {"vector": like, "gradient": like}
        if {name: each.shape for name, each in tensors.items()} != {
            name: each.shape for name, each in own.items()
        }:
            raise RequestError("the saved anchor of svrg is that of another network")
        return cls(share, **{name: each.to(like.device, like.dtype) for name, each in tensors.items()})
