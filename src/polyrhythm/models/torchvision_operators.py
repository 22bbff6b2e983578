"""Lets torchvision be imported where its compiled operators cannot be loaded.

A torchvision built for CUDA beside a CPU-only torch fails at import, because its Python code annotates the
operators `torchvision::nms` and `torchvision::qnms`, which only its compiled library would register.
Classifiers use neither, so it is enough that their schemas exist.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def define_missing_operators() -> torch.library.Library | None:
    """Defines the schemas that torchvision needs at import, if its compiled library cannot; call it before.

    Returns:
        What keeps the definitions alive, or None where nothing was missing.
    """
    if "torchvision" in sys.modules or _compiled_library_loads():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


def _compiled_library_loads() -> bool:
    # a schema that is defined here and then registered by the library too is fatal, so the library goes first
    package = find_spec("torchvision")
    folders = package.submodule_search_locations if package else None
    for folder in folders or []:
        for file in (*Path(folder).glob("_C*.so"), *Path(folder).glob("_C*.pyd")):
            try:
                torch.ops.load_library(file)
            except OSError:
                continue
            return True
    return False
