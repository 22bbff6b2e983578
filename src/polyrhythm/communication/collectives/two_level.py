"""Two-level all-reduce: inside hosts first, then between them on shards, then inside again.

Cho, Finkler, Kung, Hunter, "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy",
MLSys 2019; the 2D ring of Jia et al., arXiv 1807.11205 (2018).

    inside     reduce-scatter: member j of every group of p holds shard j, summed over its group
    between    all-reduce of shard j over the members j of all groups
    inside     all-gather

p = group. Between hosts a rank sends p times less than in one large ring, and a host as much as one rank would. Ranks
of a host must be neighbors. Where the last group is smaller, its members hold several shards each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator
from torch import Tensor

from polyrhythm.communication.collective import (
    COLLECTIVES,
    Collective,
    Members,
    MessageCollective,
    PointToPoint,
    SlicedCollective,
)
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.cost.all_reduce import Sent
from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen


class TwoLevel(MessageCollective):
    """Groups of neighboring ranks reduce to shards, shards are summed between groups, and gathered again.

    Attributes:
        group: ranks of a host; the last group may have fewer.
        inside: the collective inside a group; `ring` or `direct`.
        between: the collective between groups, over messages.
    """

    group: int = Field(default=2, ge=1)
    inside: Annotated[Collective, chosen("collective", COLLECTIVES)] = Ring()
    between: Annotated[Collective, chosen("collective", COLLECTIVES)] = Ring()

    @model_validator(mode="after")
    def _check(self) -> TwoLevel:
        if not isinstance(self.inside, SlicedCollective):
            raise RequestError(
                f"two_level: inside={self.inside.name} leaves no shards: use inside=ring or inside=direct"
            )
        if not isinstance(self.between, MessageCollective):
            raise RequestError(
                f"two_level: between={self.between.name} cannot run on shards: use one over messages, as between=ring"
            )
        return self

    def reduce_vector(self, ranks: PointToPoint, vector: Tensor, tag: int) -> None:
        place = _Place(self.group, ranks.size, ranks.rank)
        members = Members(ranks, place.members)
        slices = [vector[start:stop] for start, stop in place.slices(vector.numel())]
        if members.size > 1:
            self._inside.reduce_slices(members, slices, tag)
        for shard in place.shards_of(members.rank):
            start, stop = place.cut(vector.numel(), shard), place.cut(vector.numel(), shard + 1)
            self._between.all_reduce(Members(ranks, place.holders(shard)), vector[start:stop], tag)
        if members.size > 1:
            self._inside.gather_slices(members, slices, tag)

    def seconds(
        self, machine: Machine, ranks: int, payload: Payload, between: Machine | None = None
    ) -> float:
        """Return the time by the formulas of both collectives.

        It is exact for equal groups and equal shards. A smaller last group adds up its shards one after the other, and
        ends no later than this.

        Args:
            machine: links inside a group, and between groups without `between`.
            ranks: N.
            payload: the vector.
            between: links between groups. Where p ranks share a NIC, each has a p-th of its bandwidth.
        """
        group = min(self.group, ranks)
        shard = Payload(-(-payload.elements // group), payload.element_bytes)
        outer_s = self._between.seconds(between or machine, -(-ranks // group), shard)
        shards_of_smallest = -(-group // (ranks % group or group))
        return self._inside.seconds(machine, group, payload) + shards_of_smallest * outer_s

    def sent(self, ranks: int, rank: int, payload: Payload) -> Sent:
        place = _Place(self.group, ranks, rank)
        number = rank - place.members[0]
        sent = Sent()
        if len(place.members) > 1:
            slices = [
                (stop - start) * payload.element_bytes for start, stop in place.slices(payload.elements)
            ]
            sent += self._inside.sent_slices(slices, number)
        for shard in place.shards_of(number):
            elements = place.cut(payload.elements, shard + 1) - place.cut(payload.elements, shard)
            holders = place.holders(shard)
            if len(holders) > 1:
                piece = Payload(elements, payload.element_bytes)
                sent += self._between.sent(len(holders), holders.index(rank), piece)
        return sent

    @property
    def _inside(self) -> SlicedCollective:
        assert isinstance(self.inside, SlicedCollective)
        return self.inside

    @property
    def _between(self) -> MessageCollective:
        assert isinstance(self.between, MessageCollective)
        return self.between


@dataclass(frozen=True)
class _Place:
    """A rank's group, and the holders of shards; there are as many shards as the largest group has members."""

    group: int
    ranks: int
    rank: int

    @property
    def members(self) -> range:
        return self._members(self.rank // self.group)

    @property
    def shards(self) -> int:
        return min(self.group, self.ranks)

    def cut(self, elements: int, shard: int) -> int:
        """Start of a shard."""
        return Payload(elements, 1).first_bytes(shard, self.shards)

    def shards_of(self, number: int) -> range:
        """The shards of a member of this rank's group: one, but several where the group is small."""
        size = len(self.members)
        return range(number * self.shards // size, (number + 1) * self.shards // size)

    def slices(self, elements: int) -> list[tuple[int, int]]:
        """Start and end of the shards of each member of this rank's group."""
        own = [self.shards_of(number) for number in range(len(self.members))]
        return [(self.cut(elements, shards.start), self.cut(elements, shards.stop)) for shards in own]

    def holders(self, shard: int) -> Sequence[int]:
        """The rank that holds a shard in each group."""
        groups = range(-(-self.ranks // self.group))
        return [self._holder(self._members(number), shard) for number in groups]

    def _members(self, number: int) -> range:
        return range(number * self.group, min((number + 1) * self.group, self.ranks))

    def _holder(self, members: range, shard: int) -> int:
        """The member m with m·p <= shard·q + q-1 < (m+1)·p, of q members and p shards."""
        return members[((shard + 1) * len(members) - 1) // self.shards]
