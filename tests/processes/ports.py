"""Ports that nothing else takes meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000


def free_port() -> int:
    """Gives a port of the loopback interface below those that the system hands out by itself.

    One of those might be anybody's before it is used here.
    """
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert handed_out > _LOWEST
    while True:
        port = random.SystemRandom().randrange(_LOWEST, handed_out)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
