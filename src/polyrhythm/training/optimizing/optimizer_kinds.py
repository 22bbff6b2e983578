"""Which optimisers may run on a slice of the flat vector: classes by name, as a plan names them."""

from __future__ import annotations

import torch

from polyrhythm.training.optimizers.downpour_adagrad import DownpourAdagradOptimizer
from polyrhythm.training.optimizers.lamb import LAMBOptimizer
from polyrhythm.training.optimizers.lars import LARSOptimizer
from polyrhythm.training.optimizers.ngsgd import NaturalGradientSGD
from polyrhythm.training.optimizers.tf1_rmsprop import TF1RMSPropOptimizer

# Optimisers that treat every number of the vector alike, so that they may run on any slice of it.
ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.ASGD,
        TF1RMSPropOptimizer,
        DownpourAdagradOptimizer,
    )
}

# Optimisers that look at whole layers: each parameter stays a span of its own.
LAYERWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in (LARSOptimizer, LAMBOptimizer, NaturalGradientSGD)
}

KINDS = ELEMENTWISE | LAYERWISE
