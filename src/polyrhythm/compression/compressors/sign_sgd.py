"""signSGD with majority vote.

Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: compressed optimization for non-convex problems", ICML 2018,
arXiv 1802.04434; Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with majority vote is communication efficient
and fault tolerant", ICLR 2019, arXiv 1810.05291.

    w' = w - lr sgn(sum_i sgn(g_i))        sgn(0) = +1, so a tie counts as +1

Every step moves each weight by `lr`, so rates are some hundred times smaller than those of plain SGD. Votes count
alike, however many samples are behind them; a worker without any has none. The optimizer sees the result of the vote.

Payload: one bit a number, 1 for those at or above zero.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyrhythm.compression.compressor import Compressor, Place, check_length
from polyrhythm.compression.packing import pack, packed_bytes, unpack


class SignSGD(Compressor):
    """One bit a number each way: every worker votes for a direction.

    Attributes:
        feedback: error feedback; always off: the error of a vote is not added to later ones.
    """

    biased: ClassVar[bool] = True
    votes: ClassVar[bool] = True

    feedback: bool = False

    def nbytes(self, place: Place) -> int:
        return packed_bytes(place.numbers, 1)

    def encode(self, vector: Tensor, place: Place, newest: Tensor | None = None) -> Tensor:
        return pack(vector >= 0, 1)

    def decode(self, payload: Tensor, place: Place) -> Tensor:
        check_length(self.name, payload, self.nbytes(place))
        return unpack(payload, place.numbers, 1).to(place.dtype).mul_(2).sub_(1)
