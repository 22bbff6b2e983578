from __future__ import annotations

from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime

ALPHA, BANDWIDTH = 0.25, 1024.0  # powers of two, so that times are exact


class _Log:
    """Transfers, and when each has left and arrived."""

    def __init__(self) -> None:
        self.time = VirtualTime()
        self.network = ConstantNetwork(self.time, ALPHA, BANDWIDTH)
        self.left: dict[str, float] = {}
        self.arrived: dict[str, float] = {}

    def transfer(self, name: str, source: int, to: int, nbytes: int) -> None:
        self.network.transfer(
            source,
            to,
            nbytes,
            lambda: self.left.update({name: self.time.now()}),
            lambda: self.arrived.update({name: self.time.now()}),
        )


def test_a_message_takes_alpha_plus_its_bytes() -> None:
    log = _Log()
    log.transfer("large", 0, 1, 4096)
    log.transfer("empty", 2, 1, 0)
    log.time.run()
    assert log.left == {"empty": 0.0, "large": 4.0}
    assert log.arrived == {"empty": ALPHA, "large": 4.0 + ALPHA}


def test_a_sender_sends_one_message_after_the_other() -> None:
    log = _Log()
    for number, to in enumerate((1, 2, 1)):
        log.transfer(f"{number}", 0, to, 1024)
    log.transfer("from 1", 1, 0, 1024)  # full duplex: receiving does not delay sending
    log.time.run()
    assert log.left == {"0": 1.0, "1": 2.0, "2": 3.0, "from 1": 1.0}
    assert log.arrived == {name: at + ALPHA for name, at in log.left.items()}


def test_an_idle_sender_starts_at_once() -> None:
    log = _Log()
    log.transfer("first", 0, 1, 1024)
    log.time.at(8.0, lambda: log.transfer("later", 0, 1, 2048))
    log.time.run()
    assert log.arrived == {"first": 1.0 + ALPHA, "later": 10.0 + ALPHA}
