"""The communicator's own all-reduce: through shared memory, over TCP, or by NCCL.

    s = x[0] + … + x[N-1]        in the order of ranks, NCCL's and that of gloo (more than 16 hosts) excepted

In simulation it is `direct`. Its messages are not ours, and there is no formula for its time.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator, Handle


class Library(Collective):
    """The communicator's own collectives: by shared memory, TCP or NCCL for real, `direct` in simulation."""

    in_messages: ClassVar[bool] = False

    def all_reduce(self, ranks: Communicator, tensor: Tensor, tag: int = 0) -> None:
        ranks.all_reduce(tensor)

    def space(self, communicator: Communicator, name: str) -> Communicator:
        """Return the communicator itself; its collectives have a message space of their own already."""
        return communicator

    def start(self, ranks: Communicator, tensor: Tensor, tag: int) -> Handle:
        return ranks.start_all_reduce(tensor)
