"""Which host a rank is on, as far as shared memory and networks can tell."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_UNKNOWN = "-"


def host_key(address: str = "") -> str:
    """Gives a text that is equal for two ranks if they share a host.

    Network namespaces of one machine are different hosts: they have addresses, links and abstract sockets of their
    own. The address tells apart virtual machines that were cloned while they ran, which are equal in all the rest.

    Args:
        address: under which this host is reached by the others.
    """
    return " ".join([socket.gethostname(), _boot_id(), _network_namespace(), address])


def machine_key() -> str:
    """Gives a text that is equal for two processes that run on the same cores, in whatever containers they are."""
    boot = _boot_id()
    return boot if boot != _UNKNOWN else socket.gethostname()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return _UNKNOWN


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return _UNKNOWN
