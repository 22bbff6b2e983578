"""What Ctrl-C does before and after everything is loaded; loading is tried in a terminal in tests/on_processes."""

from __future__ import annotations

import gc
import io
import signal
import sys

import pytest

from polyrhythm.cli import entry, main
from polyrhythm.launch.process import loading


def test_it_interrupts_what_is_under_way() -> None:
    with pytest.raises(KeyboardInterrupt):
        entry.interrupt(signal.SIGINT, sys._getframe())
    with pytest.raises(KeyboardInterrupt):
        entry.interrupt(signal.SIGINT, None)


def test_an_interrupt_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "command_line", lambda _: interrupted)
    with pytest.raises(SystemExit) as ended:
        main.main(["strategies"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_it_is_taken_over_unless_somebody_ignores_it(before: object, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(main, "main", lambda: found.append(signal.getsignal(signal.SIGINT)))
    kept = signal.signal(signal.SIGINT, before)  # type: ignore[arg-type]
    try:
        entry.main()
    finally:
        signal.signal(signal.SIGINT, kept)
    assert found == [entry.interrupt if before is signal.default_int_handler else before]


def test_nothing_is_collected_while_modules_are_loaded_and_everything_afterwards() -> None:
    assert gc.isenabled()
    seen = []

    def interrupted() -> None:
        with loading():
            seen.append(gc.isenabled())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("encoding", "printed"), [("latin-1", b"\xe4 ? ?"), ("utf-8", b"\xc3\xa4 \xe2\x80\xa6 \xe9")]
)
def test_what_a_terminal_cannot_show_ends_nothing(
    encoding: str, printed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(main, "command_line", lambda _: lambda *_, **__: sys.stdout.write("ä … \udce9"))
    with pytest.raises(SystemExit):
        main.main([])
    assert terminal.buffer.getvalue() == printed  # type: ignore[attr-defined]
