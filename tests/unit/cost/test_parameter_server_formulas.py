"""What a parameter server costs, by hand."""

from __future__ import annotations

import pytest

from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.cost.parameter_server import (
    asynchronous_step_s,
    exchange_s,
    mean_staleness,
    server_bytes,
    staleness,
    synchronous_step_s,
    worker_bytes,
)

M = Payload(1_000_000, 4)
GIGABIT = Machine(latency_s=1e-4, seconds_per_byte=8e-9)


def test_bytes() -> None:
    assert worker_bytes(M) == 8_000_000
    assert server_bytes(6, 3, M) == 16_000_000


def test_the_fuller_nic_limits_an_exchange() -> None:
    assert exchange_s(GIGABIT, 1, 1, M) == pytest.approx(0.0321)  # 4 MB at 125 MB/s
    assert exchange_s(GIGABIT, 8, 2, M) == pytest.approx(0.1281)  # a server's: 8 shards of 2 MB
    assert exchange_s(GIGABIT, 2, 8, M) == pytest.approx(0.0321)  # a worker's: 8 shards of 0.5 MB


def test_a_header_goes_with_every_message() -> None:
    machine = Machine(seconds_per_byte=1.0, header_bytes=64)
    assert exchange_s(machine, 3, 2, Payload(10, 4)) == 3 * (20 + 64)
    assert exchange_s(machine, 1, 2, Payload(10, 4)) == 2 * (20 + 64)


def test_steps() -> None:
    assert synchronous_step_s(GIGABIT, 8, 2, M, compute_s=0.5) == pytest.approx(0.5 + 2 * 0.1281)
    assert asynchronous_step_s(GIGABIT, 2, 1, M, compute_s=0.5) == pytest.approx(0.5 + 2 * 0.0321)
    assert asynchronous_step_s(GIGABIT, 32, 1, M, compute_s=0.5) == pytest.approx(
        32 * 0.032
    )  # 31 steps a second


def test_staleness() -> None:
    assert staleness(8) == 7
    firsts = [*range(4), *([3] * 4 * 9)]  # 4 workers, 10 steps each
    assert mean_staleness(4, 10) == pytest.approx(sum(firsts) / 40)
