"""Shards together: where workers go in step, all shards are at the same version when a step is over."""

from __future__ import annotations

from polyrhythm.strategies.invariant import Handled, Invariant, Stepped, Violation


class ShardsTogether(Invariant):
    """Every server has made as many updates as every worker steps."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def handled(self, event: Handled) -> None:
        """Notes the version."""
        self._versions[event.server] = event.version

    def stepped(self, event: Stepped) -> None:
        """Nobody can be ahead before this worker has pushed again."""
        for server, version in self._versions.items():
            if version != event.step + 1:
                raise Violation(
                    f"version of server {server} after step {event.step}",
                    rank=event.rank,
                    time_s=event.time_s,
                    expected=event.step + 1,
                    found=version,
                )
