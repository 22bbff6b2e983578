"""Of two guests whose hosts cannot reach each other, the second is refused in one line, and the run continues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from on_processes.commands import Started, wait_for
from on_processes.runs import ending
from on_processes.two_hosts import switched_hosts, tool
from on_processes.verb import POLYRHYTHM
from polyrhythm.events import Event, Notice, WorkerJoined, WorkerProgress

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

TRAIN = [
    *("train", "--data", "digits", "--model", "mlp", "--batch-size", "8", "--strategy", "synchronous"),
    *("--listen", "10.79.0.1:4711", "--workers", "3", "--vacant", "2", "--restarts", "0", "--epochs", "5000"),
    *("--silence-s", "60", "--out", "run"),
]


def test_the_second_of_two_guests_is_refused_that_cannot_reach_each_other(tmp_path: Path) -> None:
    with switched_hosts(3) as (names, switch), ending() as started:
        for port in ("port2", "port3"):  # both reach the first host, and not each other
            tool("ip", "netns", "exec", switch, "bridge", "link", "set", "dev", port, "isolated", "on")

        def on_host(name: str, words: list[str], run: str) -> Started:
            command = ["ip", "netns", "exec", name, POLYRHYTHM, *words]
            started.append(Started(command, tmp_path, tmp_path / run))
            return started[-1]

        command = on_host(names[0], TRAIN, "run")
        wait_for(lambda: (tmp_path / "run" / "join-token").exists(), "the run to listen")
        join = ["join", "10.79.0.1:4711", "--token-file", "run/join-token", "--threads", "1"]
        on_host(names[1], join, "first")
        command.wait_for(lambda event: isinstance(event, WorkerJoined))
        second = on_host(names[2], join, "second").result()
        assert second.status == 1
        (line,) = [line for line in second.err.splitlines() if line.startswith("error: ")]
        assert "this host (10.79.0.3) cannot reach rank 1 of the run at 10.79.0.2:" in line

        def is_notice(event: Event) -> bool:
            return isinstance(event, Notice) and "cannot reach rank 1" in event.text

        notice = command.wait_for(is_notice)
        assert isinstance(notice, Notice)
        assert notice.text.endswith("its place is vacant")
        later = notice.time_s
        command.wait_for(
            lambda event: isinstance(event, WorkerProgress) and event.worker == 1 and event.time_s > later
        )
