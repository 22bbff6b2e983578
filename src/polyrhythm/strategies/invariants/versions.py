"""Versions: a server's version rises by one with every update, and nobody is answered with an older one."""

from __future__ import annotations

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Delivered, Handled, Invariant, Violation


class Versions(Invariant):
    """Versions are monotone."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._shown: dict[tuple[int, int, int], int] = {}

    def handled(self, event: Handled) -> None:
        """A message makes one update or none."""
        known = self._latest.setdefault(event.server, 0)
        if event.version_before != known or event.version not in (known, known + 1):
            raise Violation(
                "a server's version",
                rank=event.server,
                time_s=event.time_s,
                expected=f"{known} and then {known} or {known + 1}",
                found=f"{event.version_before} and then {event.version}",
            )
        self._latest[event.server] = event.version

    def delivered(self, event: Delivered) -> None:
        """What a worker gets is never older than what it had."""
        if event.message.kind is not Kind.PARAMETERS or event.source not in self._latest:
            return
        key = event.source, event.to, event.to_incarnation
        before = self._shown.get(key, 0)
        if event.message.version < before:
            raise Violation(
                f"the version that rank {event.source} answers with",
                rank=event.to,
                time_s=event.time_s,
                expected=f"at least {before}",
                found=event.message.version,
            )
        self._shown[key] = event.message.version
