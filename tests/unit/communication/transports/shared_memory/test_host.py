"""What tells hosts apart."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from polyrhythm.communication.transports.shared_memory.meeting import host_key


def test_a_host_is_name_boot_network_and_address() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = f"net:[{os.stat('/proc/self/ns/net').st_ino}]"
    assert host_key("10.0.0.1") == f"{socket.gethostname()} {boot} {network} 10.0.0.1"


def test_without_linux_name_and_address_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(os, "readlink", fail)
    assert host_key("::1") == f"{socket.gethostname()} - - ::1"
