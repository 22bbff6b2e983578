"""Starting a script's ranks and ending them, with scripts that need no torch and so start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.cli.main import command_line
from polyrhythm.communication.transports.torch_distributed.rendezvous import PREFIX
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch import script as script_ranks
from polyrhythm.launch.devices import available_cores
from polyrhythm.launch.script import POLICY_KEY, SERVERS_KEY, policy_of, run_script


@pytest.fixture(autouse=True)
def _much_time_to_leave_and_little_for_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_ranks, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(script_ranks, "GRACE_S", 60.0)


def write(folder: Path, *lines: str) -> Path:
    script = folder / "script.py"
    script.write_text("\n".join(["import json, os, signal, sys", *lines]))
    return script


def test_ranks_have_torchruns_variables_their_arguments_and_their_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "17")
    script = write(
        tmp_path,
        "facts = {'environment': dict(os.environ), 'arguments': sys.argv, 'name': __name__}",
        "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}.json', 'w').write(json.dumps(facts))",
    )
    run_script(script, [str(tmp_path), "--workers", "9"], workers=2)

    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, facts in enumerate(found):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "POLYRHYTHM_WORKERS": "2",
            "POLYRHYTHM_GENERATION": "0",
            "OMP_NUM_THREADS": str(max(1, available_cores() // 2)),
        }
        assert {name: facts["environment"][name] for name in expected} == expected
        assert facts["arguments"] == [str(script), str(tmp_path), "--workers", "9"]
        assert facts["name"] == "__main__"
    assert len({facts["environment"]["MASTER_PORT"] for facts in found}) == 1


@pytest.mark.parametrize(
    ("given", "asked", "threads"), [("3", None, "3"), ("3", 5, "5")], ids=["environment", "option"]
)
def test_threads_are_as_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, asked: int | None, threads: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    script = write(tmp_path, "open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])")
    run_script(script, [str(tmp_path / "found")], workers=1, threads=asked)
    assert (tmp_path / "found").read_text() == threads


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("sys.exit(3)", r"^worker 1 \(rank 1\) left with status 3$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"^worker 1 \(rank 1\) was killed by SIGKILL$"),
    ],
    ids=["status", "signal"],
)
def test_a_rank_that_fails_is_named_and_the_others_are_asked_to_leave(
    tmp_path: Path, ending: str, words: str
) -> None:
    ready, left = tmp_path / "ready", tmp_path / "left"
    os.mkfifo(ready)
    script = write(
        tmp_path,
        "if os.environ['RANK'] == '1':",
        f"    open({str(ready)!r}).read()",  # until rank 0 is ready
        f"    {ending}",
        "def leave(*_):",
        f"    open({str(left)!r}, 'w').write('in order')",
        "    sys.exit()",
        "signal.signal(signal.SIGTERM, leave)",
        f"open({str(ready)!r}, 'w').close()",
        "signal.pause()",
    )
    with pytest.raises(RunError, match=words):
        run_script(script, workers=2)
    assert left.read_text() == "in order"


def test_an_interrupted_launcher_ends_even_ranks_that_do_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_ranks, "GRACE_S", 0.5)
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    script = write(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        f"held = open({str(alive)!r}, 'w')",
        "os.kill(os.getppid(), signal.SIGINT)",
        "signal.pause()",
    )
    with pytest.raises(KeyboardInterrupt):
        run_script(script, workers=1)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody holds it any more


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    script = write(
        tmp_path, f"held = open({str(alive)!r}, 'w')", "print(file=held, flush=True)", "signal.pause()"
    )
    program = f"from polyrhythm.launch.script import run_script; run_script({str(script)!r}, workers=2)"
    with subprocess.Popen([sys.executable, "-c", program]) as launcher, alive.open() as held:
        assert [held.readline(), held.readline()] == ["\n", "\n"]
        launcher.kill()
        assert held.read() == ""  # the end of the file: both ranks have left


def test_wrong_requests_are_refused_before_anything_starts(tmp_path: Path) -> None:
    script = write(tmp_path)
    with pytest.raises(RequestError, match=r"there is no script nowhere\.py: give the path"):
        run_script("nowhere.py", workers=1)
    with pytest.raises(RequestError, match=r"workers must be at least 1 \(given 0\)"):
        run_script(script, workers=0)
    with pytest.raises(RequestError, match=r"threads must be at least 1 \(given -1\)"):
        run_script(script, workers=1, threads=-1)
    with pytest.raises(RequestError, match=r"restarts must be at least 0 \(given -1\)"):
        run_script(script, workers=1, restarts=-1)


def test_the_verb_leaves_a_scripts_own_options_alone(tmp_path: Path) -> None:
    script = write(tmp_path, f"open({str(tmp_path / 'heard')!r}, 'a').write(repr(sys.argv[1:]))")
    command_line("run")(
        ["run", "--workers", "1", str(script), "--epochs", "3", "--workers", "8", "--", "-x"],
        standalone_mode=False,
    )
    assert (tmp_path / "heard").read_text() == "['--epochs', '3', '--workers', '8', '--', '-x']"


def test_a_script_that_never_joins_is_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_script(write(tmp_path, "print('done')"), workers=2)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "polyrhythm: the script has ended without calling polyrhythm.join: unless it shares"
    )
    assert "each of its 2 processes did all of it" in said[0]


def test_one_that_has_joined_is_told_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Worker 0 leaves the number of servers in the store when it joins."""
    policy = json.dumps(policy_of(strategy_from("synchronous"), 1))
    script = write(
        tmp_path,
        "import torch.distributed as dist",
        "port = int(os.environ['MASTER_PORT'])",
        "store = dist.TCPStore('127.0.0.1', port, None, is_master=False, wait_for_workers=False)",
        f"store = dist.PrefixStore({PREFIX!r}, store)",
        f"store.set({POLICY_KEY!r}, {policy!r})",
        f"store.set({SERVERS_KEY!r}, '0')",
    )
    run_script(script, workers=1)
    assert capfd.readouterr().err == ""
