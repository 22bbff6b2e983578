"""A message that is leaving over a link."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch import Tensor

from polyrhythm.communication.transports.torch_distributed.groups import FOREVER
from polyrhythm.errors import PeerLost


class SendHandle:
    """A message that is leaving; keeps its bytes alive until then.

    Args:
        works: the library's, one for the header and one for the payload. Each can be waited for only once.
        kept: what the library reads from.
        to: the receiver.
    """

    def __init__(self, works: list[Any], kept: tuple[Tensor | None, ...], to: int) -> None:
        self._works = works
        self._kept = kept
        self._to = to
        self._ended = False
        self._broken = False
        self._ending = threading.Lock()
        self._waiter: threading.Thread | None = None

    def done(self) -> bool:
        """Whether the message has left. The library's sends cannot be asked, so who asks gets a thread that waits."""
        if not self._ended and self._waiter is None:
            self._waiter = threading.Thread(target=self._end, name=f"sending to {self._to}", daemon=True)
            self._waiter.start()
        return self._ended

    def wait(self, patience: timedelta = FOREVER) -> None:
        """Blocks until the message has left.

        Raises:
            PeerLost: the receiver is gone, or takes longer than `patience`; the link is of no use then.
        """
        self._end(patience)
        if self._broken:
            raise PeerLost(self._to, "sending to it")

    def _end(self, patience: timedelta = FOREVER) -> None:
        with self._ending:
            if self._ended:
                return
            try:
                for work in self._works:
                    work.wait(patience)
            except RuntimeError:
                self._broken = True
            self._works, self._kept, self._ended = [], (), True
