"""What real ranks do with each other first, and how they tell of a loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost

SOON_S = 9.0
"""How long the news of a death may take on a busy machine: it comes with the closing of a connection, in a millisecond,
and not with a time limit, of which the shortest is of 10 s."""


def greet_all(network: Communicator) -> None:
    """Opens all links in both directions."""
    others = [rank for rank in range(network.size) if rank != network.rank]
    for to in others:
        network.send(to, Message(Kind.PUSH, torch.ones(3)))
    for source in others:
        network.receive(source)


def loss(work: Callable[[], Any]) -> tuple[int, float]:
    """Gives the lost rank, and when `work` said so."""
    with pytest.raises(PeerLost) as caught:
        work()
    return caught.value.rank, time.monotonic()
