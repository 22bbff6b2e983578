"""Hosts that exist, on one machine: network namespaces joined by a switch, their links shaped to a rate.

    host 0 ── eth0 ═══ port0 ─┐
    host 1 ── eth0 ═══ port1 ─┤ bridge, in a namespace of its own
    host 2 ── eth0 ═══ port2 ─┘

What leaves a host is shaped at its eth0, what comes to it at its port of the switch, so several senders share one
receiver's link as they would at a real switch. Nothing outside the namespaces is touched, and deleting them takes
everything with them. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "polyrhythm-hosts"
_CLONE_NEWNET = 0x40000000

BURST_S = 0.5e-3
LEAST_BURST_BYTES, MOST_BURST_BYTES = 1_600, 64_000
"""What a shaped link lets pass at once: what it carries in half a millisecond, and no less than a packet. With less, a
timer that is late throttles a fast link; with more, small messages pass unshaped: the four packets that this once was
at least are a third of a model of 19 kB, so that a link of 10 Mb/s carried it as one of 15 Mb/s would."""

PLAIN_BURST, PLAIN_LATENCY = "32kb", "400ms"
"""Of a plain token bucket: what passes at once, and the longest queue."""

FLOWS = 64
"""Connections that share a link take turns, as under fair queueing, the default of Linux hosts. In one queue the two
directions of a link would take turns, since each needs the other's acknowledgements, and whoever comes first would
have the whole link. Connections are told apart by the sum of their ports; now and then two share a place."""

MTU = 1500
"""Bytes of a packet, less its Ethernet header."""
_ETHERNET_BYTES, _IP_BYTES, _TCP_BYTES = 14, 20, 32
_PLACE_OF_CONNECTION = ",".join(
    [
        "7",
        f"40 0 0 {_ETHERNET_BYTES + _IP_BYTES}",  # A = the source's port
        "7 0 0 0",  # X = A
        f"40 0 0 {_ETHERNET_BYTES + _IP_BYTES + 2}",  # A = the destination's port
        "12 0 0 0",  # A = A + X
        f"84 0 0 {FLOWS - 1}",  # A = A & (FLOWS - 1)
        f"4 0 0 {(1 << 16) + 2}",  # A = A + class 1:2
        "22 0 0 0",  # return A
    ]
)
"""A program of the kernel's packet filter: gives the class of a packet."""

_SETTINGS = {
    # Links of a long job are warm: a connection that was idle keeps its window.
    "net/ipv4/tcp_slow_start_after_idle": "0",
    # Driven by losses, of which there are none; others pace by their own estimate of the bandwidth and of the queue.
    "net/ipv4/tcp_congestion_control": "reno",
}


@dataclass(frozen=True)
class Host:
    """A namespace with one shaped link.

    Attributes:
        namespace: its name.
        address: its IPv4 address, as the other hosts reach it.
    """

    namespace: str
    address: str

    def enter(self) -> None:
        """Moves the calling thread, and all that it starts from now on, into this host.

        Raises:
            OSError: the namespace is gone, or this is not root.
        """
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as handle:
            if library.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


def headers_share(mtu: int = MTU) -> float:
    """Return how many bytes a shaped link counts for each that TCP, with its time stamps, carries in full packets."""
    return (mtu + _ETHERNET_BYTES) / (mtu - _IP_BYTES - _TCP_BYTES)


@contextmanager
def shaped_hosts(
    count: int, bits_per_s: float, *, plain: bool = False, mtu: int = MTU
) -> Iterator[list[Host]]:
    """Makes hosts, and removes them whatever happens.

    Args:
        count: how many, at most 250.
        bits_per_s: of every host's link, in each direction.
        plain: whether a link is one queue behind a token bucket (`tc … tbf`), and TCP as this system has it; else
            connections take turns.
        mtu: bytes of a packet, less its Ethernet header; 9,000 for what is called jumbo frames.

    Raises:
        subprocess.CalledProcessError: `ip` or `tc` failed; without root they do.
    """
    sweep()
    name = f"{PREFIX}-{os.getpid()}"
    switch = f"{name}-switch"
    hosts = [Host(f"{name}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for number in range(count):
            shape = _shape_plainly if plain else _shape
            _add(hosts[number], switch, f"port{number}", mtu)
            shape(hosts[number].namespace, "eth0", bits_per_s)
            shape(switch, f"port{number}", bits_per_s)
            if not plain:
                _settle(hosts[number], bits_per_s)
        yield hosts
    finally:
        for namespace in (switch, *(host.namespace for host in hosts)):
            _delete(namespace)


def sweep() -> None:
    """Removes the hosts of processes that were killed before they could."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*"):
        owner = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            _delete(path.name)


def _add(host: Host, switch: str, port: str, mtu: int) -> None:
    inside = ("ip", "-n", host.namespace)
    _run("ip", "netns", "add", host.namespace)
    _run(
        *("ip", "link", "add", "eth0", "mtu", str(mtu), "netns", host.namespace, "type", "veth"),
        *("peer", "name", port, "mtu", str(mtu), "netns", switch),
    )
    _run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "eth0", "up")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")


def _settle(host: Host, bits_per_s: float) -> None:
    """Lets a host's TCP be that of a long job on a fair link."""
    _run(*("ip", "-n", host.namespace, "link", "set", "eth0", "gso_max_size", str(_burst_bytes(bits_per_s))))
    for key, value in _SETTINGS.items():
        _run("ip", "netns", "exec", host.namespace, "sh", "-c", f"echo {value} > /proc/sys/{key}")


def _shape_plainly(namespace: str, device: str, bits_per_s: float) -> None:
    """Lets a device send at a rate, in one queue."""
    bucket = ("rate", f"{round(bits_per_s)}bit", "burst", PLAIN_BURST, "latency", PLAIN_LATENCY)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def _shape(namespace: str, device: str, bits_per_s: float) -> None:
    """Lets a device send at a rate, and its connections take turns."""
    rate, part, burst = round(bits_per_s), round(bits_per_s / FLOWS), _burst_bytes(bits_per_s)
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add dev {device} parent 1: classid 1:1 htb rate {rate}bit burst {burst}b cburst {burst}b",
        f"filter add dev {device} parent 1: protocol ip bpf bytecode '{_PLACE_OF_CONNECTION}' flowid 1:2",
    ]
    lines += [
        f"class add dev {device} parent 1:1 classid 1:{place + 2:x} "
        f"htb rate {part}bit ceil {rate}bit burst 1600b cburst {burst}b quantum 1514"
        for place in range(FLOWS)
    ]
    _run("tc", "-n", namespace, "-batch", "-", text="\n".join(lines))


def _burst_bytes(bits_per_s: float) -> int:
    return min(MOST_BURST_BYTES, max(LEAST_BURST_BYTES, round(bits_per_s / 8 * BURST_S)))


def _delete(namespace: str) -> None:
    with suppress(subprocess.CalledProcessError):
        _run("ip", "netns", "delete", namespace)


def _run(*command: str, text: str = "") -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, input=text)
