from pathlib import Path

import pytest

from polyrhythm.data.user_cache import cache_folder, write_whole


def test_the_folder_follows_the_desktop_convention(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/polyrhythm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_folder() == Path("/home/ada/.cache/polyrhythm")


def test_writes_whole_and_replaces(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, b"first")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"first")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
