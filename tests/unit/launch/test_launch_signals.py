from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from polyrhythm.launch.signals import ASKING, asked_to_stop, held_back, interruption


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


def test_a_signal_before_the_run_is_passed_on_to_it() -> None:
    asked: list[str] = []
    with asked_to_stop():
        os.kill(os.getpid(), signal.SIGTERM)
        with asked_to_stop(lambda: asked.append("stop"), lambda: asked.append("notice")):
            assert asked == ["notice", "stop"]
    assert asked == ["notice", "stop"]


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_after_the_run_waits_until_its_files_are_written(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with asked_to_stop():
            with asked_to_stop(lambda: None):
                pass
            os.kill(os.getpid(), number)
            assert heard == []
        assert heard == [number]
    finally:
        signal.signal(number, before)


def test_a_second_interrupt_cuts_the_writing_short() -> None:
    def write() -> None:
        with asked_to_stop():
            os.kill(os.getpid(), signal.SIGINT)
            written.append("some")
            os.kill(os.getpid(), signal.SIGINT)
            written.append("all")

    written: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        write()
    assert written == ["some"]
    with pytest.raises(KeyboardInterrupt), asked_to_stop():  # nothing of the last time is left
        os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_that_is_gone_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked: list[str] = []
        with asked_to_stop(lambda: asked.append("stop")):
            os.kill(os.getpid(), signal.SIGHUP)
        assert asked == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ASKING)
def test_only_a_machine_that_gives_notice_preempts(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrhythm.launch.signals._arrived", {number})
    (tmp_path / "config.yaml").write_text("workers: 2\nnotice_s: 30.0\n")
    (tmp_path / "without.yaml").write_text("workers: 2\nnotice_s: null\n")
    given = [
        ["train", "--notice-s", "5"],
        ["train", "--notice-s=5"],
        ["train", "--resume", str(tmp_path)],
        ["join"],
    ]
    for arguments in given:
        expected = ("preempted", 75) if number == signal.SIGTERM else ("interrupted", 130)
        assert interruption(arguments) == expected
    for arguments in [
        ["train", str(tmp_path / "without.yaml")],
        ["train", "missing.yaml"],
        ["evaluate", "\0"],
    ]:
        assert interruption(arguments) == ("interrupted", 130)
