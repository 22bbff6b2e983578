"""What a host sends of a run: only files of the run folder are unpacked."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.submission.engines.ssh import unpack_run


def archive(*members: tuple[str, bytes | str, str]) -> io.BytesIO:
    """Gives a tar file of members: name, content or target, and kind."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as opened:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            if kind == "file":
                assert isinstance(content, bytes)
                info.size = len(content)
                opened.addfile(info, io.BytesIO(content))
                continue
            kinds = {
                "link": tarfile.SYMTYPE,
                "hard": tarfile.LNKTYPE,
                "dir": tarfile.DIRTYPE,
                "pipe": tarfile.FIFOTYPE,
            }
            info.type, info.linkname = kinds[kind], str(content)
            opened.addfile(info)
    found.seek(0)
    return found


@pytest.mark.parametrize("folder", [Path("runs/a"), Path("../here/runs/a")])
def test_a_run_arrives_with_all_its_files(tmp_path: Path, folder: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    sent = archive(
        ("runs/a", "", "dir"),
        ("runs/a/config.yaml", b"epochs: 1", "file"),
        ("runs/a/checkpoints/step.safetensors", b"weights", "file"),
        ("runs/a/checkpoints/best.safetensors", "runs/a/checkpoints/step.safetensors", "hard"),
    )
    if folder.parts[0] == "..":
        sent = archive(
            ("here/runs/a/config.yaml", b"epochs: 1", "file"),
            ("here/runs/a/checkpoints/step.safetensors", b"weights", "file"),
            ("here/runs/a/checkpoints/best.safetensors", "here/runs/a/checkpoints/step.safetensors", "hard"),
        )
    unpack_run(sent, here, folder)
    run = here / "runs" / "a"
    assert (run / "config.yaml").read_bytes() == b"epochs: 1"
    assert (run / "checkpoints" / "best.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "best.safetensors",
        "step.safetensors",
    ]


@pytest.mark.parametrize(
    "members",
    [
        [(".bashrc", b"evil", "file")],
        [("runs/b/config.yaml", b"evil", "file")],
        [("runs/a/../../.bashrc", b"evil", "file")],
        [("/etc/passwd", b"evil", "file")],
        [("runs/a/out", "../..", "link"), ("runs/a/out/.bashrc", b"evil", "file")],
        [("runs/a/secret", "secret", "hard")],
        [("runs/a/secret", "runs/a/../../secret", "hard")],
        [("runs/a/pipe", "", "pipe")],
    ],
    ids=[
        "beside",
        "another run",
        "dots",
        "absolute",
        "through a link",
        "hard link",
        "hard link by dots",
        "pipe",
    ],
)
def test_nothing_else_is_unpacked(tmp_path: Path, members: list[tuple[str, bytes | str, str]]) -> None:
    (tmp_path / "secret").write_text("secret")
    act: Callable[[], None] = lambda: unpack_run(archive(*members), tmp_path, Path("runs/a"))  # noqa: E731
    with pytest.raises((tarfile.TarError, RequestError)):
        act()
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert files == [tmp_path / "secret"]


def test_files_are_not_written_through_links_that_are_here_already(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "mine")
    unpack_run(archive(("runs/a/report.html", b"evil", "file")), tmp_path, Path("runs/a"))
    assert (tmp_path / "mine").read_text() == "mine"
    assert (run / "report.html").read_bytes() == b"evil"
