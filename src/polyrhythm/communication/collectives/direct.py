"""Direct reduce-scatter and all-gather, the "butterfly synchronisation" of Deep Image.

Wu, Yan, Shan, Dang, Sun, "Deep Image: Scaling up Image Recognition", 2015, arXiv 1501.02876, section 3.2.

The vector is cut into one slice a rank. Every rank receives its own slice from all others, adds the slices up in
rank order, and sends the sum to all. Bytes sent by each rank: `2 M (N-1)/N`; bit-identical on all ranks, because
each slice is summed once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message


class PointToPoint(Protocol):
    """The part of a communicator that this collective is built from."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def start_send(self, to: int, message: Message) -> Handle:
        """Starts to send."""

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message."""


def all_reduce(ranks: PointToPoint, tensor: Tensor, tag: int) -> None:
    """Adds `tensor` up over all ranks, in place.

    Args:
        ranks: who takes part.
        tensor: any shape and size, contiguous; changed in place.
        tag: shared by all messages of this call and by no others under way.
    """
    if ranks.size == 1:
        return
    slices = list(torch.tensor_split(tensor.view(-1), ranks.size))
    mine, others = slices[ranks.rank], [rank for rank in range(ranks.size) if rank != ranks.rank]
    sends = [ranks.start_send(to, Message(Kind.VECTOR, slices[to], tag=tag)) for to in others]
    parts = {source: _payload(ranks, source, tag) for source in others}
    for handle in sends:
        handle.wait()
    parts[ranks.rank] = mine.clone()
    mine.copy_(parts[0])
    for rank in range(1, ranks.size):  # in rank order: the same bits whoever arrives first
        mine.add_(parts[rank])
    sends = [ranks.start_send(to, Message(Kind.VECTOR, mine, tag=tag)) for to in others]
    for source in others:
        slices[source].copy_(_payload(ranks, source, tag))
    for handle in sends:
        handle.wait()


def _payload(ranks: PointToPoint, source: int, tag: int) -> Tensor:
    _, message = ranks.receive(source, tag)
    assert message.tensor is not None, "a collective's message always carries its slice"
    return message.tensor
