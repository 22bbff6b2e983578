"""A processor on which the bits of matrix products depend on where their operands lie in memory.

On some processors BLAS rounds by the address of its operands modulo 64 bytes, and by the number of threads: with MKL on
AVX-512, `W @ x` of a 37 x 53 matrix has four results over the 16 offsets of its first element. `--round-by-address`
gives every processor that property, so that a comparison of bits that leans on equal addresses fails everywhere.

`vectors` perturbs dot products and products of a matrix with a single row or column, which is what has been seen;
`matrices` perturbs all products. Autograd and torch.compile work otherwise under a dispatch mode, so tests of loops
that users write and of compiled networks are not run under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LINE_BYTES = 64
_PRODUCTS = {
    "addbmm", "addmm", "addmm_", "addmv", "addmv_", "baddbmm", "bmm", "dot", "mm", "mv", "vdot", "_addmm_activation",
}  # fmt: skip


class RoundingByAddress(TorchDispatchMode):
    """Perturbs the last bits of products by the offsets of their operands in 64-byte lines.

    Args:
        all_products: whether products of two matrices are perturbed as well.
    """

    def __init__(self, all_products: bool) -> None:
        super().__init__()
        self.all_products = all_products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in _PRODUCTS
            and result.device.type == "cpu"
            and result.is_floating_point()
        ):
            factors = [each for each in args if isinstance(each, Tensor) and each.dim()][-2:]
            if self.all_products or any(each.dim() == 1 or min(each.shape[-2:]) == 1 for each in factors):
                first, second = (each.data_ptr() % _LINE_BYTES // 2 for each in factors)
                result.mul_(1 + (first * 7 + second * 11) % 5 * torch.finfo(result.dtype).eps)
        return result


@contextmanager
def rounding_by_address(all_products: bool) -> Iterator[None]:
    """Perturb products in this thread and in threads that are started meanwhile."""
    run = threading.Thread.run

    def perturbed(thread: threading.Thread) -> None:
        with RoundingByAddress(all_products):
            run(thread)

    threading.Thread.run = perturbed  # type: ignore[method-assign]
    try:
        with RoundingByAddress(all_products):
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
