import gzip
import threading
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polyrhythm.data.sources.fashion_mnist import VerifiedFile, download, read_all, unpack_debian
from polyrhythm.errors import RequestError

CONTENTS = {"images": b"pixels" * 1000, "labels": b"names" * 1000}
FILES = [VerifiedFile(name, len(text), sha256(text).hexdigest()) for name, text in CONTENTS.items()]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "web"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


def test_downloads_and_verifies(web, tmp_path):
    with served(web) as address:
        download(address, FILES, tmp_path / "into")
    assert read_all(tmp_path / "into", FILES) == list(CONTENTS.values())


def test_a_damaged_download_leaves_no_file(web, tmp_path):
    (web / "images.gz").write_bytes(gzip.compress(b"something else"))
    with served(web) as address, pytest.raises(RequestError, match=r"http://.*images\.gz is damaged"):
        download(address, FILES, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_download_that_is_too_large_is_cut_off(web, tmp_path):
    (web / "images.gz").write_bytes(bytes(100_000))
    with served(web) as address, pytest.raises(RequestError, match="too large or too slow"):
        download(address, FILES, tmp_path / "into")


def test_a_missing_page_and_a_dead_server_are_reasons(web, tmp_path):
    with served(web) as address, pytest.raises(RequestError, match=r"absent\.gz: .*[Nn]ot [Ff]ound"):
        download(address, [VerifiedFile("absent", 1, "")], tmp_path)
    with pytest.raises(RequestError, match="refused"):
        download(address, FILES, tmp_path)


def script(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Stand-ins for the two commands: the archive is a tar that is unpacked where the real one would be."""
    folder = tmp_path / "bin"
    folder.mkdir()
    inside = tmp_path / "package" / "usr" / "share" / "numbers"
    inside.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (inside / f"{name}.gz").write_bytes(gzip.compress(content))
    make = f"tar -cf numbers_1.deb -C {tmp_path}/package ."
    script(folder, "apt-get", f'[ "$1 $2" = "download numbers" ] && {make}')
    script(folder, "dpkg-deb", 'mkdir "$3" && tar -xf "$2" -C "$3"')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_takes_files_out_of_a_package(commands, tmp_path):
    unpack_debian("numbers", FILES, tmp_path / "into")
    assert read_all(tmp_path / "into", FILES) == list(CONTENTS.values())


def test_fetches_package_lists_of_its_own_where_the_system_has_none(commands, tmp_path):
    lists = 'lists="${2#*=}"; [ "$1" = -o ] || { echo "E: Unable to locate package" >&2; exit 100; }'
    update = '[ "$5" = update ] && touch "$lists/partial/fetched" && exit 0'
    make = f'[ "$5 $6" = "download numbers" ] && tar -cf numbers_1.deb -C {tmp_path}/package .'
    script(commands, "apt-get", f'{lists}\n{update}\n[ -f "$lists/partial/fetched" ] && {make}')
    unpack_debian("numbers", FILES, tmp_path / "into")
    assert read_all(tmp_path / "into", FILES) == list(CONTENTS.values())


def test_what_apt_says_is_the_reason(commands, tmp_path):
    script(commands, "apt-get", 'echo "first line" >&2; echo "E: no network" >&2; exit 100')
    with pytest.raises(RequestError, match="apt-get update: E: no network"):
        unpack_debian("numbers", FILES, tmp_path / "into")


def test_a_system_without_apt_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="apt-get update: No such file"):
        unpack_debian("numbers", FILES, tmp_path / "into")


def test_a_package_with_other_files_leaves_nothing(commands, tmp_path):
    (tmp_path / "package/usr/share/numbers/labels.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(RequestError, match=r"labels\.gz is damaged"):
        unpack_debian("numbers", FILES, tmp_path / "into")
    with pytest.raises(RequestError, match=r"does not hold absent\.gz"):
        unpack_debian("numbers", [VerifiedFile("absent", 1, "")], tmp_path / "into")
    assert not (tmp_path / "into").exists()
