"""What checks of three ranks share: their number, and words for the others and for what they send."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Message

SIZE = 3
Check = Callable[[Communicator], None]


def others(communicator: Communicator) -> list[int]:
    return [rank for rank in range(communicator.size) if rank != communicator.rank]


def payload(message: Message) -> Tensor:
    assert message.tensor is not None
    return message.tensor
