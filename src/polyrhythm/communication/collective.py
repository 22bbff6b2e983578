"""Collectives: algorithms that move and add up vectors over the ranks of a communicator.

Each algorithm is one file of `collectives/`. Most are written over point-to-point messages alone, so that
they run over any communicator, real or simulated, and give the same bits on both. All ranks of a group must
give tensors of the same size and dtype, and call in the same order.

An algorithm for powers of two takes part with any number of ranks by folding (`folded`): Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, section 4.

    N = 6:   4 ──▶ 3,  5 ──▶ 0     then 0, 1, 2, 3 continue alone     3 ──▶ 4,  0 ──▶ 5
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.cost.all_reduce import Sent, core_size, fold_partner
from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.specs import Config

COLLECTIVES = "polyrhythm.communication.collectives"


class PointToPoint(Protocol):
    """The part of a communicator that collectives are built from."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def start_send(self, to: int, message: Message) -> Handle:
        """Start to send."""

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Wait for a message."""


class Collective(Config):
    """An algorithm for adding up a tensor over all ranks, to the same bits everywhere.

    Attributes:
        in_messages: whether it is made of messages of ours, so that several may be in progress at once.
    """

    in_messages: ClassVar[bool] = True

    @abstractmethod
    def all_reduce(self, ranks: Communicator, tensor: Tensor, tag: int = 0) -> None:
        """Add `tensor` up over all ranks, in place.

        Args:
            ranks: communicator of the participants.
            tensor: tensor of any shape, size and dtype of a message, contiguous; changed in place.
            tag: tag of this call's messages. Calls that are in progress at once need different ones.

        Raises:
            PeerLost: a rank has failed or left.
            RunError: another rank's tensor has another size or dtype.
        """

    def space(self, communicator: Communicator, name: str) -> Communicator:
        """Return the message space that calls are made in: one of their own, in which no one else uses tags."""
        return communicator.subgroup(name, range(communicator.size))

    def prepared(self, ranks: Communicator, tag: int = 0) -> Collective:
        """Return this collective after it has measured what it needs to know of the links. All ranks must call it."""
        return self

    def passed_on(self) -> Collective:
        """Return this collective for other ranks, unprepared; link figures that some have become those of all."""
        return self

    def start(self, ranks: Communicator, tensor: Tensor, tag: int) -> Handle:
        """Start `all_reduce` in the background; if a rank has failed, all calls in progress in this space end.

        A loss is reported there once, and a replacement takes no part: a rank that missed it would wait for ever.
        """

        def work() -> None:
            try:
                self.all_reduce(ranks, tensor, tag)
            except PeerLost:
                ranks.revoke_here()
                raise

        return ranks.start(work)


class MessageCollective(Collective):
    """A collective over point-to-point messages with a known cost."""

    def all_reduce(self, ranks: PointToPoint, tensor: Tensor, tag: int = 0) -> None:
        if ranks.size > 1:
            self.reduce_vector(ranks, tensor.detach().view(-1), tag)

    @abstractmethod
    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        """Add a one-dimensional tensor up, in place, over at least two ranks."""

    @abstractmethod
    def seconds(self, machine: Machine, ranks: int, payload: Payload) -> float:
        """Return the time of an all-reduce by the formula of `cost.all_reduce`."""

    @abstractmethod
    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        """Return the messages of one rank in an all-reduce."""


class SlicedCollective(MessageCollective):
    """A collective that cuts the vector: a reduce-scatter, and an all-gather of what has been reduced."""

    @abstractmethod
    def reduce_slices(self, ranks: PointToPoint, slices: Sequence[Tensor], tag: int) -> None:
        """Leave in `slices[rank]` its sum over all ranks, in place; the other slices hold anything afterwards.

        Args:
            ranks: communicator of the participants.
            slices: one a rank, one-dimensional and contiguous, of any sizes, the same on all ranks.
            tag: tag of the messages.
        """

    @abstractmethod
    def gather_slices(self, ranks: PointToPoint, slices: Sequence[Tensor], tag: int) -> None:
        """Overwrite every slice with that of its rank, in place; arguments as in `reduce_slices`."""

    @abstractmethod
    def sent_slices(self, slice_bytes: Sequence[int], rank: int) -> Sent:
        """Return what one rank sends in both, for slices of these sizes."""

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        slices = torch.tensor_split(vector, ranks.size)
        self.reduce_slices(ranks, slices, tag)
        self.gather_slices(ranks, slices, tag)

    def reduce_scatter(self, ranks: PointToPoint, tensor: Tensor, tag: int = 0) -> Tensor:
        """Add up over all ranks, each rank one slice.

        Args:
            ranks: communicator of the participants.
            tensor: contiguous; changed in place, and outside this rank's slice of no use afterwards.
            tag: tag of the messages.

        Returns:
            This rank's slice, as a view of `tensor`, which is cut as `torch.tensor_split` does.
        """
        slices = torch.tensor_split(tensor.detach().view(-1), ranks.size)
        self.reduce_slices(ranks, slices, tag)
        return slices[ranks.rank]

    def all_gather(self, ranks: PointToPoint, tensor: Tensor, tag: int = 0) -> None:
        """Overwrite all but this rank's slice of `tensor` with the other ranks' slices, in place."""
        self.gather_slices(ranks, torch.tensor_split(tensor.detach().view(-1), ranks.size), tag)

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        return self.sent_slices(payload.slice_bytes(ranks), rank)


class Members:
    """Some ranks of a group as a group of their own, over the same messages and tags.

    Args:
        ranks: the whole group.
        members: members of it, this rank among them, by their new numbers.
    """

    def __init__(self, ranks: PointToPoint, members: Sequence[int]) -> None:
        self._ranks = ranks
        self._members = members

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        return self._members.index(self._ranks.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self._members)

    def start_send(self, to: int, message: Message) -> Handle:
        """Start to send to a member."""
        return self._ranks.start_send(self._members[to], message)

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Wait for a message of a member, which must be named."""
        assert source is not None, "others' messages arrive the same way"
        _, message = self._ranks.receive(self._members[source], tag)
        return source, message


def start_send(ranks: PointToPoint, to: int, vector: Tensor, tag: int) -> Handle:
    """Start to send a vector, which must not change until the handle is done."""
    return ranks.start_send(to, Message(Kind.VECTOR, vector, tag=tag))


def receive(ranks: PointToPoint, source: int, tag: int, like: Tensor) -> Tensor:
    """Wait for a vector of the size and dtype of `like`; return it on the same device.

    Raises:
        RunError: the received vector has another size or dtype.
    """
    _, message = ranks.receive(source, tag)
    vector = message.tensor
    if vector is None or vector.shape != like.shape or vector.dtype != like.dtype:
        given = "nothing" if vector is None else f"{vector.numel()} numbers of {vector.dtype}"
        raise RunError(
            f"rank {source} of a collective sent {given} where rank {ranks.rank} expects {like.numel()} of "
            f"{like.dtype}: all ranks must give tensors of one size and dtype"
        )
    return vector.to(like.device)


def exchange(ranks: PointToPoint, peer: int, vector: Tensor, tag: int, like: Tensor) -> Tensor:
    """Send a vector to a peer while it sends one like `like`; return that when both have passed."""
    handle = start_send(ranks, peer, vector, tag)
    found = receive(ranks, peer, tag, like)
    handle.wait()
    return found


def add_up_whole(ranks: PointToPoint, tensor: Tensor, tag: int) -> None:
    """Add a contiguous tensor up, in place: every rank sends it to all others, and adds up all in the order of ranks.

    One latency, where slices take two; the bits are those of `collectives/direct`.
    """
    vector = tensor.detach().view(-1)
    others = [(ranks.rank + distance) % ranks.size for distance in range(1, ranks.size)]
    sends = [start_send(ranks, to, vector, tag) for to in others]
    parts = {source: receive(ranks, source, tag, vector) for source in others}
    for handle in sends:
        handle.wait()
    parts[ranks.rank] = vector.clone()
    vector.copy_(parts[0])
    for rank in range(1, ranks.size):
        vector.add_(parts[rank])


def folded(ranks: PointToPoint, vector: Tensor, tag: int, reduce_core: Callable[[int], None]) -> None:
    """Add up over any number of ranks by an algorithm for a power of two.

    Args:
        ranks: communicator of the participants.
        vector: values to add up, `(n,)`; changed in place.
        tag: tag of the messages.
        reduce_core: function that sums `vector` over the first ranks; its argument is their number, a power of two.
            Called on these ranks only.
    """
    core, partner = core_size(ranks.size), fold_partner(ranks.size, ranks.rank)
    if ranks.rank >= core:
        assert partner is not None
        # Its vector counts as a part of its partner's, and the sum is the answer: it takes part in no round.
        vector.copy_(exchange(ranks, partner, vector, tag, vector))
        return
    if partner is not None:
        vector.add_(receive(ranks, partner, tag, vector))
    reduce_core(core)
    if partner is not None:
        start_send(ranks, partner, vector, tag).wait()
