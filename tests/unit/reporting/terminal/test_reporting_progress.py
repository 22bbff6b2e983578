import io
import re

import pytest
from rich.console import Console

from polyrhythm.events import Notice, RunEnded, WorkerLost, WorkerProgress
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.progress import VIRTUAL, LiveProgress, PlainProgress, drawing, progress_for


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain(events, **keys):
    stream = io.StringIO()
    progress = PlainProgress(stream, **keys)
    for event in events:
        progress.on_event(event)
    progress.close()
    return stream.getvalue().splitlines()


def drawn(figures, width=100, height=40):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(drawing(figures, height))
    return console.file.getvalue()


def test_plain_lines_of_a_whole_run(story, ended):
    assert plain([*story, ended]) == [
        "training lenet5 (61,706 parameters) on fashion-mnist: "
        "parameter_server(servers=2, consistency=asynchronous), 2 workers, 2 servers, 2 epochs of 10 steps",
        "epoch 1/2 done  test top-1 81.2 %  top-5 96.9 %  loss 0.75  after 4.5 s",
        "notice: worker 1 is slow <b>today</b>",
        # (320 · 0.5 + 200 · 2.5) / 520; 80 + 50; (4 · 1 + 2 · 2 + 4 · 3) / 24; ten steps of 0.4 s
        "epoch 1/2  step 10/20  loss 1.27  130 images/s  staleness 0.8 (max 3)  left 4.0 s",
        "epoch 2/2 done  test top-1 90.6 %  top-5 98.4 %  loss 0.5  after 9.0 s",
    ]  # and no line on the end: the result follows, with the same figures


def test_virtual_seconds_are_marked(story, ended):
    lines = plain(story, mark=VIRTUAL)
    assert lines[1].endswith("after 4.5 s (virtual)")
    assert lines[3].endswith("left 4.0 s (virtual)")
    figures = RunFigures.of(story)
    console = Console(file=io.StringIO(), width=100, height=40, color_system=None)
    console.print(drawing(figures, 40, VIRTUAL))
    assert "9.0 s gone, 2.7 s left (virtual)" in console.file.getvalue()


@pytest.mark.parametrize(("every_s", "lines"), [(0.5, 3), (4.0, 2), (100.0, 0)])
def test_plain_lines_about_workers_come_every_so_many_seconds_of_run_time(story, every_s, lines):
    assert sum(" left " in line for line in plain(story, every_s=every_s)) == lines


def test_plain_lines_add_up_workers_only_once_most_of_them_have_reported(story):
    first = next(position for position, event in enumerate(story) if isinstance(event, WorkerProgress))
    one_of_two = story[: first + 1]
    assert len(plain(one_of_two, every_s=0.5)) == 1, "half of the speed would look like the speed"
    other_lost = [*one_of_two[:first], WorkerLost(time_s=0.1, worker=1, rank=1, step=0), one_of_two[first]]
    assert " left " in plain(other_lost, every_s=0.5)[-1], "who is lost is not waited for"


def test_plain_lines_leave_out_staleness_where_there_are_no_servers(story):
    workers_only = [event for event in story if not hasattr(event, "server")]
    assert not any("staleness" in line for line in plain(workers_only, every_s=1.0))


def test_a_lost_worker_is_said_and_marked(story):
    told = [*story, WorkerLost(time_s=9.5, worker=1, rank=1, step=15)]
    assert plain(told)[-1] == "notice: worker 1 (rank 1) is lost (last report: step 15), the others continue"
    figures = RunFigures.of(told)
    rows = drawn(figures).splitlines()
    assert any(row.split()[:3] == ["1", "(lost)", "15/20"] for row in rows), rows


def test_an_interrupted_run_says_so(story):
    end = RunEnded(time_s=9.4, outcome="interrupted", result={})
    assert plain([*story, end])[-1] == "interrupted after 9.4 s  test top-1 90.6 %  130 images/s"


def test_drawing_shows_workers_servers_test_and_time_left(story):
    text = drawn(RunFigures.of(story))
    assert "lenet5 on fashion-mnist · 2 workers + 2 servers" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "18/20", "80", "0.5", "0.05", "0.0", "%"] in rows
    assert ["1", "15/20", "30", "0.25", "0.05", "75.0", "%"] in rows
    assert ["0", "20", "0.80", "2"] in rows
    assert ["1", "12", "1.00", "3"] in rows
    assert "test top-1 90.6 % · top-5 98.4 % · loss 0.5 · epoch 2" in text
    assert "epoch 2/2" in text
    assert "110 images/s 9.0 s gone, 2.7 s left" in text


@pytest.mark.parametrize(("width", "height"), [(100, 24), (60, 24), (80, 16)])
def test_drawing_fits_a_terminal_however_many_workers(story, width, height):
    figures = RunFigures.of(story)
    for worker in range(2, 128):
        figures.add(
            WorkerProgress(
                time_s=9.0, worker=worker, epoch=1, step=15, steps=15, images=9, loss=1.0, learning_rate=0.1
            )
        )
    lines = drawn(figures, width, height).splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    shown = sum(bool(re.match(r" +\d+ +1\d/20 ", line)) for line in lines)
    assert f" {128 - shown} more" in "\n".join(lines)
    assert "images/s 9.0 s gone" in lines[-1]


def test_live_progress_clears_the_screen_for_the_result_of_a_run_that_is_done(story, ended):
    console = Console(file=Terminal(), force_terminal=True, width=100, height=40)
    progress = LiveProgress(console)
    for event in [*story, ended]:
        progress.on_event(event)
    progress.close()
    assert console.file.getvalue().endswith("\x1b[1A\x1b[2K")  # up a line, and erased


def test_live_progress_leaves_the_last_state_and_gives_the_cursor_back(story):
    console = Console(file=Terminal(), force_terminal=True, width=100, height=40)
    progress = LiveProgress(console)
    for event in [*story, RunEnded(time_s=9.4, outcome="interrupted", result={})]:
        progress.on_event(event)
    progress.close()
    progress.close()
    written = console.file.getvalue()
    assert "notice: worker 1 is slow <b>today</b>" in written
    last = written[written.rindex("lenet5 on fashion-mnist") :]
    assert "images/s interrupted after 9.4 s" in last
    assert written.rstrip().endswith("\x1b[?25h")


def test_live_progress_says_when_nothing_was_heard_for_long(story):
    now_s = 0.0
    console = Console(file=Terminal(), force_terminal=True, width=100, height=40)
    progress = LiveProgress(console, clock=lambda: now_s)
    for event in story:
        progress.on_event(event)
    assert "no news" not in console.file.getvalue()
    now_s = 75.0
    progress.close()
    assert "no news from any rank for 0:01:15" in console.file.getvalue()


def test_live_progress_draws_at_most_four_times_a_second(story, monkeypatch):
    drawings = []
    monkeypatch.setattr(
        "polyrhythm.reporting.progress.drawing",
        lambda figures, height, mark: drawings.append(figures.time_s) or "",
    )
    now_s = 0.0
    progress = LiveProgress(Console(file=Terminal(), force_terminal=True), clock=lambda: now_s)
    for index in range(100):
        now_s = index / 64
        progress.on_event(story[1])
    progress.close()
    assert len(drawings) == 7 + 1  # at 0, ¼, … 1½ seconds, and at the end


def test_the_stream_decides_which_progress_it_gets(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(progress_for(Terminal()), LiveProgress)
    assert isinstance(progress_for(io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_for(Terminal()), PlainProgress)


def test_a_notice_before_the_start_is_shown_at_once():
    console = Console(file=Terminal(), force_terminal=True)
    progress = LiveProgress(console)
    progress.on_event(Notice(time_s=0.0, text="using [2] threads"))
    assert "using [2] threads" in re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    progress.close()
