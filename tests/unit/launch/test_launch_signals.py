from __future__ import annotations

import os
import signal
import threading

import pytest

from polyrhythm.launch.signals import ASKING, asked_to_stop, held_back


@pytest.mark.parametrize("number", ASKING)
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    asked: list[str] = []
    with asked_to_stop(lambda: asked.append("stop")):
        os.kill(os.getpid(), number)
        assert asked == ["stop"]
    assert signal.getsignal(number) is before


def test_a_second_interrupt_interrupts() -> None:
    asked: list[str] = []
    with asked_to_stop(lambda: asked.append("stop")):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert asked == ["stop"]


def test_on_another_thread_signals_keep_their_meaning() -> None:
    before = [signal.getsignal(number) for number in ASKING]
    found: list[object] = []

    def look() -> None:
        with asked_to_stop(lambda: None):
            found.extend(signal.getsignal(number) for number in ASKING)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == before


def test_signals_are_held_back_and_come_afterwards() -> None:
    asked: list[str] = []
    with asked_to_stop(lambda: asked.append("stop")):
        with held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert asked == []
            assert signal.sigpending() == {signal.SIGTERM}
        assert asked == ["stop"]
