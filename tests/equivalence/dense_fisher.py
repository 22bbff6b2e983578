"""The natural gradient's running estimate as whole matrices in numpy, by singular values; nothing of ours is in it."""

from __future__ import annotations

import numpy as np

LEAST_SHARE = 5e-4
"""Of the largest value, below which neither a direction's nor the rest's is."""


class Dense:
    """F = R' D R + r I after any rows: of T = eta S + (1 - eta) F, what one power iteration from R finds.

    Args:
        first: `(m, n)`, the first rows, taken three times, beginning with nothing but their trace.
        rank: directions of R.
    """

    def __init__(self, first, rank):
        size = first.shape[1]
        basis = np.zeros((rank, size))
        basis[np.arange(size) % rank, np.arange(size)] = 1
        basis[np.arange(rank), np.arange(rank)] = 1.1
        self.basis = basis / np.linalg.norm(basis, axis=1, keepdims=True)
        self.fisher = np.sum(first**2) / first.size * np.eye(size)
        for _ in range(3):
            self.update(first, 0.9)

    def update(self, new, eta):
        """Takes rows into it."""
        rank, size = self.basis.shape
        whole = eta / len(new) * new.T @ new + (1 - eta) * self.fisher
        _, values, self.basis = np.linalg.svd(self.basis @ whole, full_matrices=False)
        rest = (np.trace(whole) - values.sum()) / (size - rank)
        least = LEAST_SHARE * values[0]
        spectrum = np.maximum(values - rest, least)
        self.fisher = self.basis.T @ np.diag(spectrum) @ self.basis + max(rest, least) * np.eye(size)

    def preconditioned(self, new, alpha=4.0):
        """Gives X (F + alpha tr(F) / n I)^-1."""
        size = len(self.fisher)
        return new @ np.linalg.inv(self.fisher + alpha * np.trace(self.fisher) / size * np.eye(size))
