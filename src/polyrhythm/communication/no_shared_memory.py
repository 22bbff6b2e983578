"""What is raised where ranks were to share memory, and cannot."""

from __future__ import annotations

from polyrhythm.errors import RequestError


class NoSharedMemory(RequestError):
    """Ranks share no memory.

    Args:
        reason: why not.

    Attributes:
        reason: why not.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"these ranks share no memory: {reason}")
        self.reason = reason
