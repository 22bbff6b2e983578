"""The hosts of the ssh engine."""

import importlib.util
import io
import tarfile
from types import SimpleNamespace

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.submission.engines.ssh import Host, pack_environment, read_hosts


def test_a_host_a_line():
    text = "# ours\nanna@desktop slots=2 data='/my photos'\n\nlaptop port=2222 python=/opt/py directory=/w  # slow\n"
    assert read_hosts(text, "hosts") == (
        Host("anna@desktop", 2, 0, "", "", "/my photos"),
        Host("laptop", 1, 2222, "/opt/py", "/w", ""),
    )
    assert read_hosts(text, "hosts")[0].name == "desktop"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no host"),
        ("# none\n", "names no host"),
        ("a slot=2", "line 1: 'slot' is not slots, port"),
        ("a slots", "line 1: 'slots' is not"),
        ("a\nb slots=0", "line 2: slots must be a whole number, 1 or more"),
        ("a slots=two", "slots must be a whole number"),
        ("a port=-1", "port must be a whole number"),
        ("-oProxyCommand=x", "is not a host"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text, complaint):
    with pytest.raises(RequestError, match=complaint):
        read_hosts(text, "hosts")


def test_a_copied_environment_holds_the_packages_and_polyrhythm_itself(monkeypatch, tmp_path):
    for name in ("torch/__init__.py", "torch/__pycache__/old.pyc", "yaml/__init__.py", "here.pth"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    packed = io.BytesIO()
    pack_environment(packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        names = archive.getnames()
    assert {"torch/__init__.py", "yaml/__init__.py", "polyrhythm/submission/local_ranks.py"} <= set(names)
    assert any(name.endswith(".dist-info/METADATA") for name in names)
    assert not [name for name in names if name.endswith((".pyc", ".pth"))]
