"""The hosts of the ssh engine."""

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.submission.engines.ssh import Host, read_hosts


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
