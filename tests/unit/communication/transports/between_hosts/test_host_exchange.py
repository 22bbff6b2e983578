"""Who moves the bytes, where threads meet at the worst moment."""

from __future__ import annotations

from collections import deque

import torch

from polyrhythm.communication.transports.between_hosts.collectives import Order
from unit.communication.transports.between_hosts.meshes import mesh


class Overlooked(deque[Order]):
    """Orders, of which another thread leaves one just after it has been seen that there are none."""

    def __init__(self, late: Order) -> None:
        super().__init__()
        self._late = [late]

    def __bool__(self) -> bool:
        found = len(self) > 0
        if not found and self._late:
            self.append(self._late.pop())
        return found


def test_what_is_started_just_after_the_last_look_for_orders_is_added_up_and_not_dropped() -> None:
    first, late = torch.ones(3), torch.full((5,), 2.0)
    others = [torch.ones(3), torch.full((5,), 3.0)]
    order = Order(late, (0, 1))
    with mesh(2) as members:
        members[0]._orders = Overlooked(order)
        handles = [members[0].start_all_reduce(first)]
        assert not order.over, "nobody else has come to it"
        handles += [members[1].start_all_reduce(vector) for vector in others]
        for handle in handles:
            handle.wait()
        order.wait_for_end()
        assert order.error is None
        assert late.tolist() == others[1].tolist() == [5.0] * 5
