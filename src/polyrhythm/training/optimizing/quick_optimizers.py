"""Optimisers that are made without importing torch's compiler, which takes nearly as long as importing torch.

torch keeps some methods of its optimisers out of compiled code, and imports the compiler to do so when the first of
them is called. Nothing here compiles a function that makes an optimiser or asks for its state, so there is nothing to
be kept out of. This is the one place that knows how torch 2.13 does it; where another torch does it otherwise,
nothing happens, and the compiler is imported after all.
"""

from __future__ import annotations

import torch

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_KNOWN_FORM = "__dynamo_disable"
"""Where torch looks for the form of a method that is kept out of compiled code, before it makes one."""


def make_optimizers_quickly() -> None:
    """From now on, in this process and in those forked from it, optimisers do without torch's compiler."""
    for name in _METHODS:
        method = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, _KNOWN_FORM):
            setattr(method, _KNOWN_FORM, method)
