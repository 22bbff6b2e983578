"""Runs verbs of the command line, as a shell would, but for one start of Python: reads commands, writes results.

python shell.py < commands.json > results.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from polyrhythm.cli.main import _status


def run(arguments: list[str]) -> dict[str, object]:
    """Runs one command; what it and its processes write is caught."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            status = _status(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"status": status, "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
