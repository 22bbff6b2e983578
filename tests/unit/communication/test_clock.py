from __future__ import annotations

from polyrhythm.communication.transports.torch_distributed.rank import WallClock


def test_a_wall_clock_starts_at_zero_and_passes_time() -> None:
    clock = WallClock()
    before = clock.now()
    assert 0 <= before < 1
    clock.sleep(0.02)
    assert 0.02 <= clock.now() - before < 1
