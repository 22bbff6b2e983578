import gzip
from hashlib import sha256

import pytest

from polyrhythm.data.sources.fashion_mnist import VerifiedFile, read_all
from polyrhythm.errors import RequestError

CONTENT = bytes(range(256)) * 10
FILE = VerifiedFile("numbers", len(CONTENT), sha256(CONTENT).hexdigest())


def test_reads_as_it_is_and_gzipped(tmp_path):
    (tmp_path / "numbers.gz").write_bytes(gzip.compress(CONTENT))
    assert read_all(tmp_path, [FILE]) == [CONTENT]
    (tmp_path / "numbers").write_bytes(CONTENT)
    (tmp_path / "numbers.gz").unlink()
    assert read_all(tmp_path, [FILE]) == [CONTENT]


@pytest.mark.parametrize(
    "damaged",
    [
        b"not gzip at all",
        gzip.compress(CONTENT)[:-200],
        gzip.compress(CONTENT[:-1] + b"!"),
        gzip.compress(CONTENT + b"more"),
        gzip.compress(bytes(10_000_000)),
    ],
    ids=["not gzip", "cut short", "one byte changed", "longer", "a bomb"],
)
def test_what_is_damaged_is_refused_by_name(tmp_path, damaged):
    (tmp_path / "numbers.gz").write_bytes(damaged)
    with pytest.raises(RequestError, match=r"numbers\.gz is damaged.*download it again"):
        read_all(tmp_path, [FILE])


def test_a_changed_plain_file_is_refused(tmp_path):
    (tmp_path / "numbers").write_bytes(CONTENT[:-1])
    with pytest.raises(RequestError, match="damaged"):
        FILE.read(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"numbers\.gz cannot be read \(No such file"):
        FILE.read(tmp_path)
