"""The k largest numbers, with error feedback.

Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, arXiv 1704.05021; Stich, Cordonnier,
Jaggi, "Sparsified SGD with memory", NeurIPS 2018, arXiv 1809.07599.

    d_j = p_j where |p_j| is among the k largest, else 0        k = density * n;  |p - d|^2 <= (1 - k/n) |p|^2

Of equal magnitudes the first ones travel. `warm_up` lets the density fall to its value in five stages,
density^(1/5), density^(2/5), …, as Lin et al. (arXiv 1712.01887) have it.

Payload: see `sparse`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, Route
from polyrhythm.compression.sparse import count_of, decode_sparse, encode_sparse, largest, sparse_bytes
from polyrhythm.training.quantities import Positive

Density = Annotated[Positive, Field(le=1)]
"""Share of the numbers that travel: above 0, at most 1."""
_STAGES = 5


class TopK(Compressor):
    """The largest numbers travel, and all others wait.

    Attributes:
        density: share of the numbers that travel.
        route: way of adding them up among workers (`streams`): gathered, doubling, split, or by their size.
    """

    biased: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    density: Density = 0.01
    route: Route = "auto"

    @property
    def stream_route(self) -> Route:
        return self.route

    def is_dense_at(self, step: int) -> bool:
        return False

    def density_at(self, step: int) -> float:
        """Return the density at a step."""
        if step >= self.warm_up:
            return self.density
        stage = step * (_STAGES - 1) // self.warm_up + 1
        return float(self.density ** (stage / _STAGES))

    def nbytes(self, place: Place) -> int | None:
        return sparse_bytes(count_of(place.numbers, self.density_at(place.step)), place.dtype)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        indices = largest(vector, count_of(vector.numel(), self.density_at(place.step)))
        return encode_sparse(indices, vector[indices])

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        total = payload.new_zeros(place.numbers, dtype=place.dtype)
        self.add_to(total, payload, place)
        return total

    def entries(self, payload: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        return decode_sparse(payload, place.numbers, place.dtype)

    def add_to(self, total: Tensor, payload: Tensor, place: Place) -> None:
        indices, values = decode_sparse(payload, place.numbers, place.dtype)
        total[indices] += values  # indices are unique
