"""A run of somebody who is not root, with no home and a folder of the system's that only root may write into."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from on_processes.commands import environment
from on_processes.verb import POLYRHYTHM
from polyrhythm.training.checkpoint import checkpoints

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))),
    reason="only root may become somebody else",
)
NOBODY = 65534
TRAIN = ["train", "--data", "digits", "--model", "mlp", "--workers", "2", "--epochs", "1", "--json"]


def opened(meanwhile: Path) -> str:
    """Shell commands that let others reach Python, in this namespace alone, where a folder above it is closed."""
    base = Path(sys.base_prefix)
    closed = next((each for each in reversed(base.parents) if not each.stat().st_mode & 0o001), None)
    if closed is None:
        return ":"
    return (
        f"mkdir -p {meanwhile} && mount --bind {base} {meanwhile} && mount -t tmpfs -o mode=755 none {closed} "
        f"&& mkdir -p {base} && mount --bind {meanwhile} {base}"
    )


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of nobody's; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = Path(folder) / "nobodys"
        made.mkdir()
        os.chown(made, NOBODY, NOBODY)
        yield made


def as_nobody(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a verb as nobody, in its folder."""
    become = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --no-new-privs"
    script = f'{opened(home.parent / "python")} && exec {become} "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", POLYRHYTHM, *words]
    own = environment() | {"HOME": "/nonexistent", "TMPDIR": str(home)}
    return subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, timeout=120)


def test_nobody_trains_and_resumes(home: Path) -> None:
    first = as_nobody(home, *TRAIN, "--strategy", "parameter_server(servers=2, replicas=2)", "--out", "run")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["epochs"] == 1
    assert "Permission denied" not in first.stderr
    assert {path.stat().st_uid for path in home.rglob("*")} == {NOBODY}
    assert checkpoints(home / "run" / "checkpoints")
    assert [path.name for path in home.iterdir()] == ["run"]
    more = as_nobody(home, "train", "--resume", "run", "--epochs", "2", "--json")
    assert json.loads(more.stdout)["epochs"] == 2, more.stderr


def test_nobody_may_not_write_where_only_root_may(home: Path) -> None:
    (home.parent / "roots").mkdir()
    refused = as_nobody(home, *TRAIN, "--out", "../roots/run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: cannot write into ../roots/run: Permission denied")
    assert refused.stderr.count("\n") == 1
    seen = as_nobody(home, "doctor", "--workers", "2", "--out", "../roots", "--json")
    assert seen.returncode == 1, seen.stderr
    assert [each["check"] for each in json.loads(seen.stdout)["checks"] if each["state"] == "fails"] == [
        "disk"
    ]
