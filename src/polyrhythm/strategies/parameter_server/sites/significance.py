"""What a site keeps to itself until it is significant.

    U += u            every update u of the site's own
    |U_j| > t |w_j|   number j is sent, and U_j becomes 0: what was sent and what is kept add up to all updates

At w_j = 0 every change is significant; a number that has not changed never is, and with t = 0 all others are.

A packet is U with zeros for what is kept, or, where that is shorter, only the numbers that are sent and their places:
as whole numbers of 4 bytes (8 beside float64), in the bits of the parameters' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Significance:
    """One shard's unsent updates.

    Args:
        values: `(n,)`, the shard, for size and dtype.

    Attributes:
        retained: `(n,)`, U.
    """

    def __init__(self, values: Tensor) -> None:
        self.retained = torch.zeros_like(values)

    def add(self, update: Tensor) -> None:
        """Adds an update of the site's own."""
        self.retained.add_(update)

    def take(self, values: Tensor, threshold: float) -> Tensor | None:
        """Takes out what is significant beside the values as they are now; gives a packet, or None if nothing is."""
        chosen = self.retained.abs() > values.abs().mul_(threshold)
        return self._take(chosen)

    def take_all(self) -> Tensor | None:
        """Takes out everything."""
        return self._take(self.retained != 0)

    def _take(self, chosen: Tensor) -> Tensor | None:
        places = chosen.nonzero().flatten()
        if not len(places):
            return None
        sent = self.retained[places]
        self.retained[places] = 0
        short = torch.cat([sent, _as_numbers(places, sent.dtype)])
        if len(short) < len(self.retained):
            return short
        whole = torch.zeros_like(self.retained)
        whole[places] = sent
        return whole


def add_packet(values: Tensor, packet: Tensor) -> None:
    """Adds what another site has sent to the values, `(n,)`, in place."""
    if len(packet) == len(values):
        values.add_(packet)
        return
    count = len(packet) // (1 + _numbers_a_place(packet.dtype))
    places = packet[count:].clone().view(_place_dtype(packet.dtype)).long()
    values.index_add_(0, places, packet[:count])


def _place_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def _numbers_a_place(dtype: torch.dtype) -> int:
    return _place_dtype(dtype).itemsize // dtype.itemsize


def _as_numbers(places: Tensor, dtype: torch.dtype) -> Tensor:
    return places.to(_place_dtype(dtype)).view(dtype)
