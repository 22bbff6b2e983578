"""Two hosts on one machine: network namespaces with a cable between them."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE_S = 60.0


def tool(*words: str) -> str:
    """Runs a tool that ends soon; gives what it prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def ip(*words: str) -> str:
    """Runs `ip`; gives what it prints."""
    return tool("ip", *words)


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Makes two namespaces, 10.78.0.1 and 10.78.0.2, whose end of the cable is called `cable`; gives their names."""
    own = secrets.token_hex(4)  # nobody's who was killed before it could remove them
    names = [f"torchrun-{own}-{side}" for side in (1, 2)]
    cable = [f"tr{own}{side}" for side in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for side, (name, end) in enumerate(zip(names, cable, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "cable")
            ip("-n", name, "address", "add", f"10.78.0.{side}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name, end in zip(names, cable, strict=True):
            for words in (("netns", "delete", name), ("link", "delete", end)):
                with suppress(subprocess.CalledProcessError):
                    ip(*words)


@contextmanager
def switched_hosts(count: int) -> Iterator[tuple[list[str], str]]:
    """Makes namespaces, 10.79.0.1, 10.79.0.2, …, joined by a switch; gives their names and that of the switch's.

    The end of each cable at a host is called `cable`, at the switch `port1`, `port2`, …
    """
    own = secrets.token_hex(4)
    switch, names = f"switch-{own}", [f"switched-{own}-{side}" for side in range(1, count + 1)]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for side, name in enumerate(names, start=1):
            port = f"port{side}"
            ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", name, "address", "add", f"10.79.0.{side}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", switch, "link", "set", port, "up")
            plug_in(switch, port)
        yield names, switch
    finally:
        for name in (switch, *names):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def plug_in(switch: str, port: str) -> None:
    """Lets packets of a port pass."""
    ip("-n", switch, "link", "set", port, "master", "bridge")


def unplug(switch: str, port: str) -> None:
    """Lets packets of a port vanish in silence: neither end sees a broken cable, which would be retried at once."""
    ip("-n", switch, "link", "set", port, "nomaster")
