"""A worker's turns: what it gives and takes at every step, and who its neighbours are in all of them."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.strategies.gossip.mixing.ending import Ending
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topology import Shares, Topology

NAMED_UP_TO = 1000
"""Workers whose spectral gap is told; the eigenvalues of larger graphs take seconds."""


class Turns:
    """One worker's place in a topology.

    Args:
        topology: the schedule.
        workers: all of them.
    """

    def __init__(self, topology: Topology, workers: Communicator) -> None:
        self._topology = topology
        self._size = workers.size
        period = topology.period(self._size)
        self._shares = [topology.shares(workers.rank, self._size, turn) for turn in range(period)]

    def shares(self, step: int) -> Shares:
        """Gives what this worker gives and takes at a step."""
        return self._shares[step % len(self._shares)]

    def ending(self, delay: int = 0, last: int | None = None) -> Ending:
        """Makes what carries requests to stop.

        Args:
            delay: steps after which a message counts.
            last: the step after which all stop, if that is known already.
        """
        return Ending(lambda: self._topology.turns_to_all(self._size) + delay, last)


def made_anew(topology: Topology, check: Callable[[int], None], peers: int) -> Topology:
    """Gives the topology of those who are left: the same kind of graph, or a ring where so few cannot have it.

    Args:
        topology: that was asked for.
        check: refuses a number of workers that cannot have it.
        peers: how many are left.
    """
    try:
        check(peers)
    except RequestError:
        return Ring()
    return topology


def remark(topology: Topology, workers: int) -> str:
    """Says in a line how fast a topology mixes among so many workers."""
    if not 1 < workers <= NAMED_UP_TO:
        return ""
    degree = max(
        len(topology.targets(peer, workers, turn))
        for peer in range(workers)
        for turn in range(topology.period(workers))
    )
    return (
        f"{topology} of {workers} workers: spectral gap {topology.spectral_gap(workers):.4g}, at most "
        f"{degree} message{'s' if degree > 1 else ''} of a worker a step"
    )
