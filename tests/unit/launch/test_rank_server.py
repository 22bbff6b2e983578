"""Ranks that are forked from a process with its imports done run a script as Python does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from polyrhythm.launch.rank_server import ForkedRank, RankServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with closing(RankServer("1")) as started:
        yield started


def start(server: RankServer, *command: object, **variables: str) -> ForkedRank:
    started = server.start(
        list(map(str, command)), {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"} | variables
    )
    assert started is not None
    return started


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text("\n".join(lines))
    return script


def test_it_is_the_main_module_with_its_own_arguments_environment_folder_random_numbers_and_name(
    server: RankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbor.py").write_text("VALUE = 7")
    script = write(
        tmp_path,
        "import json, os, pickle, random, sys, numpy, torch, neighbor",
        "class Own: pass",
        "assert type(pickle.loads(pickle.dumps(Own()))) is Own",
        "facts = [__name__, __file__, sys.argv, sys.path[0], os.getcwd()]",
        "facts += [os.environ.get('TWO'), os.environ.get('HOME'), open('/proc/self/comm').read()]",
        "facts += [torch.get_num_threads(), neighbor.VALUE, os.getpgrp() == os.getpid()]",
        "drawn = [random.random(), numpy.random.random(), torch.initial_seed()]",
        "json.dump({'facts': facts, 'drawn': drawn}, open(sys.argv[1], 'w'))",
    )
    monkeypatch.chdir(tmp_path)
    outputs = [tmp_path / name for name in ("one", "two")]
    ranks = [start(server, script.name, output, TWO="2", RANK="3", OMP_NUM_THREADS="2") for output in outputs]
    assert [rank.wait(60.0) for rank in ranks] == [0, 0]
    found = [json.loads(output.read_text()) for output in outputs]
    for output, entry in zip(outputs, found, strict=True):
        argv = [script.name, str(output)]
        expected = ["__main__", str(script), argv, str(tmp_path), str(tmp_path), "2", None, "rank 3\n", 2]
        assert entry["facts"] == [*expected, 7, True]
    assert all(one != other for one, other in zip(*(entry["drawn"] for entry in found), strict=True))


def test_a_linked_script_imports_from_the_folder_of_its_file(server: RankServer, tmp_path: Path) -> None:
    script = write(
        tmp_path / "real",
        "import neighbor, sys",
        "open(sys.argv[1], 'w').write(f'{neighbor.VALUE} {__file__}')",
    )
    (tmp_path / "real" / "neighbor.py").write_text("VALUE = 7")
    (tmp_path / "link.py").symlink_to(script)
    assert start(server, tmp_path / "link.py", tmp_path / "found").wait(60.0) == 0
    assert (tmp_path / "found").read_text() == f"7 {tmp_path / 'link.py'}"


def test_a_module_of_a_package_is_run(
    server: RankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nfrom . import __name__ as name\nopen('found', 'w').write(f'{__name__} {name} {sys.argv[1:]}')"
    )
    monkeypatch.chdir(tmp_path)
    assert start(server, "-m", "package.train", "a").wait(60.0) == 0
    assert (tmp_path / "found").read_text() == "__main__ package ['a']"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('a word')", 1),
        ("raise ValueError('an error')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_the_status_is_that_of_the_script(
    server: RankServer, tmp_path: Path, line: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path, "import atexit, os, signal, sys", "atexit.register(lambda: print('at exit'))", line
    )
    with (
        closing(RankServer("1")) if status == 1 else nullcontext(server) as used
    ):  # its output is captured here
        assert start(used, script).wait(60.0) == status
    written = capfd.readouterr()
    if status == 1:
        trace = f'Traceback (most recent call last):\n  File "{script}", line 3, in <module>\n'
        assert "a word\n" in written.err or written.err.startswith(trace)
        assert written.out == "at exit\n"


def test_an_error_of_the_library_is_shown_at_the_line_of_the_script(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, "import polyrhythm", "polyrhythm.join('nothing').__enter__()")
    with closing(RankServer("1")) as server:
        assert start(server, script).wait(60.0) == 1
    frames = [
        line.split('"')[1] for line in capfd.readouterr().err.splitlines() if line.startswith("  File ")
    ]
    assert frames[0] == str(script)
    assert not any("polyrhythm" in Path(frame).parts for frame in frames)


def test_a_rank_is_killed_and_ends_with_its_server(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys, time", "open(sys.argv[1], 'w')", "time.sleep(600)")
    with closing(RankServer("1")) as server:
        killed, left = (start(server, script, tmp_path / name) for name in ("killed", "left"))
        with pytest.raises(subprocess.TimeoutExpired):
            left.wait(0.01)
        killed.kill()
        assert killed.wait(60.0) == -9
        assert left.poll() is None
    until = time.monotonic() + 60.0
    while Path(f"/proc/{left.pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert server.start([str(script)], {}) is None


def test_it_has_the_outputs_and_the_folder_that_it_is_given(server: RankServer, tmp_path: Path) -> None:
    write(tmp_path, "import os, sys", "print(os.getcwd())", "print(os.environ['A'], file=sys.stderr)")
    for value in ("one", "two"):
        pipes = [os.pipe() for _ in range(2)]
        rank = server.start(["script.py"], {"A": value}, str(tmp_path), [written for _, written in pipes])
        assert rank is not None
        for _, written in pipes:
            os.close(written)
        texts = [
            Path(f"/dev/fd/{read}").read_text() for read, _ in pipes
        ]  # until no process has the other end
        for read, _ in pipes:
            os.close(read)
        assert rank.wait(60.0) == 0
        assert texts == [f"{tmp_path}\n", f"{value}\n"]


def test_a_fork_of_a_command_line_has_nothing_of_it(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, signal, sys",
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler",
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL",
        "assert sys.excepthook is sys.__excepthook__ and sys.stdout is sys.__stdout__",
        "assert os.readlink('/proc/self/fd/0') == os.devnull and len(os.listdir('/proc/self/fd')) == 4",
        "print('ran')",
    )
    launcher = write(
        tmp_path / "launcher",
        "import io, os, signal, sys",
        "from contextlib import closing",
        "from polyrhythm.launch.rank_server import RankServer",
        "for number in (signal.SIGINT, signal.SIGTERM):",
        "    signal.signal(number, print)",
        "sys.excepthook = print",
        "kept = open(os.devnull)",
        "sys.stdout = io.StringIO('not yet written')",
        "with closing(RankServer(None, forks=True)) as server:",
        f"    sys.exit(server.start([{str(script)!r}], dict(os.environ)).wait(60.0))",
    )
    done = subprocess.run([sys.executable, launcher], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
