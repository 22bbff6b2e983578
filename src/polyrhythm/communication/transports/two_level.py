"""Collectives over several hosts, some with several ranks: shared memory inside a host, TCP between them.

    inside     the ranks of each host add up through shared memory
    between    one rank a host, its leader, adds up over TCP         only this touches the network
    inside     the leader hands the sums to the ranks of its host

The network card of a host carries `2 M (H-1)/H` bytes for H hosts, however many ranks they have; in one ring
over all N ranks it would carry `2 M (N-1)/N`. (Several ranks of a host with a shard each, as in
`communication/collectives/two_level.py`, would carry as much over the one card.) Large vectors go in parts,
so that the network never waits for the memory:

    inside     add 0 │ add 1 │ ····· hand out 0 │ add 2 │ ····· hand out 1 │ ····· hand out 2
    between          │────── 0 ──────│────── 1 ──────│────── 2 ──────│

`make_shared` is how the members of a communicator agree on such collectives, on those of one host, or on
neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.transports.member_collectives import CollectiveBroken, MemberCollectives
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.shared_memory.exchange import Exchange
from polyrhythm.communication.transports.shared_memory.meeting import host_of, share_memory


@dataclass(frozen=True)
class Levels:
    """Members of a communicator by host.

    Attributes:
        hosts: the members of each host, in their order, the host of member 0 first; the first of each leads.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, host_of: Sequence[str]) -> Levels:
        """Group members by the host of each."""
        hosts: dict[str, list[int]] = {}
        for member, host in enumerate(host_of):
            hosts.setdefault(host, []).append(member)
        return cls(tuple(map(tuple, hosts.values())))

    @property
    def mixed(self) -> bool:
        """Whether there are several hosts, at least one with several members."""
        return 1 < len(self.hosts) < sum(map(len, self.hosts))

    def host(self, member: int) -> int:
        """Return the number of a member's host."""
        return next(number for number, members in enumerate(self.hosts) if member in members)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first member of each host."""
        return tuple(members[0] for members in self.hosts)


_PART_BYTES = 2 << 20


class Work(Handle):
    """A collective in progress."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class TwoLevelCollectives(MemberCollectives):
    """One member's side. Tensors live on the CPU; a thread does the collectives in the order of their start.

    Args:
        levels: members by host.
        member: index of this member.
        inside: collectives of this host's members; None if it is alone on its host.
        between: collectives of the hosts' first members; None if this member is not one.

    What is raised, by the call or by the handle's `wait`: `CollectiveBroken` if a member is gone, on all members and
    from then on.
    """

    def __init__(
        self,
        levels: Levels,
        member: int,
        inside: SharedMemoryCollectives | None,
        between: MemberCollectives | None,
    ) -> None:
        self._levels = levels
        self._host = levels.host(member)
        self._inside = inside
        self._between = between
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="two-level collectives")

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> Work:
        def run() -> None:
            self._on_vector(tensor, self._add_up)
            if finish is not None:
                finish()

        return self._start(run)

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._start(lambda: self._on_vector(tensor, lambda vector: self._distribute(vector, root))).wait()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def give_up(self, reason: CollectiveBroken) -> None:
        if self._between is not None:
            self._between.give_up(reason)
        if self._inside is not None:
            self._inside.give_up(reason)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._between is not None:
            self._between.close()
        if self._inside is not None:
            self._inside.close()

    def _start(self, run: Callable[[], None]) -> Work:
        return Work(self._thread.submit(lambda: self._guarded(run)))

    def _guarded(self, run: Callable[[], None]) -> None:
        """Pass a failure inside this host on to the other hosts; the way back is `together`'s."""
        try:
            run()
        except BaseException as error:
            if self._between is not None:
                self._between.give_up(CollectiveBroken(getattr(error, "reason", str(error))))
            raise

    def _add_up(self, vector: Tensor) -> None:
        if self._inside is not None:
            self._inside.together(lambda exchange: self._add_up_in_parts(exchange, vector))
        elif self._between is not None:
            for handle in [self._between.start_all_reduce(part) for part in _parts(vector)]:
                handle.wait()

    def _add_up_in_parts(self, exchange: Exchange, vector: Tensor) -> None:
        """Add up part by part: while one is on the network, the next is added up inside, and the last handed out."""
        under_way: deque[tuple[Tensor, Handle | None]] = deque()
        for part in _parts(vector):
            exchange.all_reduce(part)
            under_way.append((part, None if self._between is None else self._between.start_all_reduce(part)))
            if len(under_way) > 1:
                _finish(exchange, *under_way.popleft())
        _finish(exchange, *under_way.popleft())

    def _distribute(self, vector: Tensor, root: int) -> None:
        host = self._levels.host(root)

        def through(exchange: Exchange) -> None:
            if self._host == host:  # all of the host have it then, the leader among them
                exchange.broadcast(vector, self._levels.hosts[host].index(root))
            if self._between is not None:
                self._between.broadcast(vector, host)
            if self._host != host:
                exchange.broadcast(vector, 0)

        if self._inside is not None:
            self._inside.together(through)
        elif self._between is not None:
            self._between.broadcast(vector, host)

    @staticmethod
    def _on_vector(tensor: Tensor, run: Callable[[Tensor], None]) -> None:
        vector = tensor.detach().contiguous().view(-1)
        run(vector)
        if not tensor.is_contiguous():
            tensor.detach().copy_(vector.view_as(tensor))


def _parts(vector: Tensor) -> tuple[Tensor, ...]:
    """Cut a vector, on all members alike."""
    parts: tuple[Tensor, ...] = vector.split(_PART_BYTES // vector.element_size())
    return parts


def _finish(exchange: Exchange, part: Tensor, between: Handle | None) -> None:
    """Wait for a part's sums, and hand them to the members of this host."""
    if between is not None:
        between.wait()
    exchange.broadcast(part, 0)


Meet = Callable[[Sequence[int], str, str], list[str]]
"""Exchanges texts of some members under a name: takes this one's, and returns all, in order, once all have arrived."""


def make_shared(
    member: int,
    members: tuple[int, ...],
    introductions: Sequence[str],
    meet: Meet,
    network: Callable[[Sequence[int]], MemberCollectives],
) -> SharedMemoryCollectives | TwoLevelCollectives | None:
    """Make collectives that use the memory which members share; None where none share any, on all alike.

    Args:
        member: index of this member.
        members: the ranks of all, among all ranks of the run.
        introductions: introductions of all, as JSON.
        meet: exchanges texts with the others.
        network: factory of collectives without shared memory for some members, this one among them.
    """
    levels = Levels.of([host_of(introduction) for introduction in introductions])
    host = levels.hosts[levels.host(member)]
    inside = None
    if len(host) > 1:
        inside = share_memory(
            host.index(member),
            tuple(members[each] for each in host),
            [introductions[each] for each in host],
            lambda subject, word: meet(host, f"{host[0]}/{subject}", word),
        )
    if not levels.mixed:
        return inside
    lacking = inside is None and len(host) > 1
    if not all(meet(range(len(members)), "levels", "" if lacking else "ready")):
        if inside is not None:
            inside.close()
        return None
    between = network(levels.leaders) if member == host[0] else None
    return TwoLevelCollectives(levels, member, inside, between)
