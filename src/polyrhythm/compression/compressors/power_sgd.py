"""PowerSGD: a matrix as the product of two thin ones, by a step of power iteration.

Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
2019, arXiv 1905.13727.

    P = orthonormal(M Q),   Q = M^T P,   d = P Q^T        Q is that of the step before (warm start), at first random
    over all workers: P of the mean of M_i Q, Q the mean of M_i^T P, so d is the same on all, and e_i = M_i - d

An all-reduce strategy exchanges P and Q in two all-reduces (`strategies.compressed_mean`); elsewhere each
sender has a pair of its own. M is a gradient as (outputs, all else). Matrices with factors that would not be
smaller are sent as they are. Orthonormalized by Gram-Schmidt, twice, since once loses digits; a column of
zeros stays one.

Payload: P, rows * r float32, then Q, columns * r float32, both by columns.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, aligned, bytes_of, check_length, values_of
from polyrhythm.errors import RequestError
from polyrhythm.training.quantities import Count

_LEAST_NORM = 1e-30


class PowerSGD(Compressor):
    """Two thin factors in place of a matrix.

    Attributes:
        rank: columns of each factor.
        seed: seed of the first factor.
        per: always `layer`, since only a layer is a matrix.
    """

    biased: ClassVar[bool] = True
    factored: ClassVar[bool] = True

    rank: Count = 2
    seed: int = 0

    @model_validator(mode="after")
    def _of_layers(self) -> Self:
        if self.per != "layer":
            raise RequestError("power_sgd factors the matrix of each layer: leave per out")
        return self

    def fits(self, rows: int, columns: int) -> bool:
        """Return whether the factors are smaller than the matrix, and their rank no higher than its."""
        return self.rank * (rows + columns) < rows * columns and self.rank <= min(rows, columns)

    def nbytes(self, place: Place) -> int:
        return 4 * self.rank * (place.rows + place.columns)

    def start(self, place: Place) -> Tensor:
        """Return the factor, `(columns, rank)`, that the step begins from."""
        if place.factor is not None:
            return place.factor.view(self.rank, place.columns).t()
        first = Place(place.rows, place.columns, section=place.section)
        draws = first.draws(self.seed, shared=True)
        return torch.randn(place.columns, self.rank, generator=draws, device="cpu")  # the same on all devices

    def left_numbers(self, place: Place) -> int:
        return self.rank * place.rows

    def left(self, matrix: Tensor, place: Place) -> Tensor:
        return matrix @ aligned(self.start(place).to(matrix.device))

    def right(self, matrix: Tensor, left: Tensor) -> Tensor:
        basis = orthonormal(left)
        left.copy_(basis)
        return matrix.t() @ basis

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        matrix = aligned(vector.float().view(place.rows, place.columns))
        left = orthonormal(self.left(matrix, place))
        return torch.cat([bytes_of(left.t()), bytes_of((matrix.t() @ left).t())])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        numbers = values_of(payload, torch.float32)
        left = numbers[: self.rank * place.rows].view(self.rank, place.rows)
        right = numbers[self.rank * place.rows :].view(self.rank, place.columns)
        return (left.t() @ right).reshape(-1).to(place.dtype)

    def factor_of(self, payload: Tensor, place: Place) -> Tensor:
        return values_of(payload[4 * self.rank * place.rows :], torch.float32)


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis, `(rows, r)`, of a matrix's columns; of columns that add nothing, zeros."""
    basis = matrix.clone()
    for column in range(basis.shape[1]):
        vector = basis[:, column]
        before = vector.norm()
        for _ in range(2):
            if column:
                vector = vector - basis[:, :column] @ (basis[:, :column].t() @ vector)
        norm = vector.norm()
        # A column in the span of the previous ones leaves only rounding errors, which are no direction.
        keeps = (norm > before * 1e-6) & (norm > _LEAST_NORM)
        # A condition in Python would look at a number, for which a GPU is waited for.
        basis[:, column] = torch.where(keeps, vector / norm, 0.0)
    return basis
