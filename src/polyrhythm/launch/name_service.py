"""How long a rank waits for a name server."""

from __future__ import annotations

import os


def ask_names_briefly() -> None:
    """Keeps a name server that does not answer from delaying this process's connections; call it before the first.

    To log it, torch looks up the name of every address that it connects to, even of loopback, one after the other.
    The resolver's usual patience is 5 seconds for each, and twice that.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
