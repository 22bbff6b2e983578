"""Replicas agree: both servers of a shard are the same, bit for bit, after every entry that both have taken."""

from __future__ import annotations

from polyrhythm.strategies.invariant import Violation
from polyrhythm.strategies.parameter_server.replication.replicated_server import Entry
from polyrhythm.strategies.role_assignment import RoleAssignment


class Agreement:
    """Compares entries; all that a server would write into a checkpoint counts.

    Args:
        cast: who does what.
    """

    def __init__(self, cast: RoleAssignment) -> None:
        self._cast = cast
        self._length = [0] * len(cast.servers)
        self._digests: dict[tuple[int, int], str] = {}

    def is_new(self, entry: Entry, time_s: float) -> bool:
        """Whether nobody has told of an entry before.

        Raises:
            Violation: another server of the shard was not the same after it.
        """
        key = entry.shard, entry.number
        if entry.number >= self._length[entry.shard]:
            self._length[entry.shard] = entry.number + 1
            self._digests[key] = entry.digest
            return True
        expected = self._digests.pop(key)
        if expected != entry.digest:
            raise Violation(
                f"the replicas of shard {entry.shard} after entry {entry.number}",
                rank=self._cast.servers[entry.shard],
                time_s=time_s,
                expected=expected,
                found=entry.digest,
            )
        return False
