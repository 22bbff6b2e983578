"""Files that users name: regular input files, strict YAML, and outputs that are checked for writability beforehand.

A pipe or a device among the inputs would be waited for or read for ever. YAML 1.1 takes the last of two equal keys,
reads `1:30` as 90 and `010` as 8; here the first is refused and the others stay the texts that they are.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.errors import RequestError

_MOST_BYTES = 16 << 20


def check_is_file(path: Path, what: str) -> None:
    """Reject an existing path that is not a file, such as a pipe or a device; folders are checked on opening.

    Raises:
        RequestError: it is so.
    """
    try:
        special = path.exists() and not (path.is_file() or path.is_dir())
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {what} {path!s:.100}: {_reason(error)}") from None
    if special:
        raise RequestError(f"{what} {path} is no file, but a pipe or a device: give a file")


def read_text(path: Path, what: str) -> str:
    """Return the text of a YAML file of at most 16 MiB.

    Raises:
        RequestError: there is none, or it holds no text.
    """
    check_is_file(path, what)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RequestError(f"{what} {path} has more than {_MOST_BYTES >> 20} MiB: give a text file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} {path} is not YAML: {error}") from None
    except OSError as error:
        raise RequestError(f"cannot read {what} {path!s:.100}: {_reason(error)}") from None


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        RequestError: the text is not YAML, or a key is given twice; `where` names the file.
    """
    try:
        _check_aliases(text, where)
        return yaml.load(text, _SafeLoader)
    except RequestError:
        raise
    except _Twice as error:
        raise RequestError(f"{where}: {error}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # also of values that cannot be a text, date or number
        raise RequestError(f"{where} is not YAML: {' '.join(str(error).split())}") from None


_MOST_REPEATED = 10_000
"""Values that aliases of a YAML text may repeat."""


def _check_aliases(text: str, where: str) -> None:
    """Reject a text with aliases that expand to too many values, or recursively.

    A few hundred bytes of aliases of aliases stand for more values than any memory holds.

    Raises:
        RequestError: they do.
    """
    if "*" not in text:
        return
    sizes: dict[int, int] = {}

    def size_of(node: Any) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise RequestError(f"{where} has an alias inside its own value: write the value out")
            return sizes[id(node)]
        sizes[id(node)] = 0  # in progress
        inside = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(map(size_of, inside))
        return sizes[id(node)]

    root = yaml.compose(text, _SafeLoader)
    if root is not None and size_of(root) > len(sizes) + _MOST_REPEATED:
        raise RequestError(
            f"{where} has aliases that stand for more than {_MOST_REPEATED:,} further values: write fewer out"
        )


class _Twice(Exception):
    """A key is given twice."""


class _SafeLoader(yaml.SafeLoader):
    """YAML without numbers to the base of 60 or 8, and without equal keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _Twice(
                        f"{key.value} is given twice (line {key.start_mark.line + 1}): leave one of them out"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SafeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in _NUMBERS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in zip(_NUMBERS, (_INT, _FLOAT), strict=True):
    _SafeLoader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def check_output(path: Path) -> None:
    """Check that a file can be written, before the work for its content starts; leaves no file.

    Raises:
        RequestError: it cannot.
    """
    try:
        if not path.parent.is_dir():
            raise RequestError(f"there is no folder {path.parent!s:.100}: make it first")
        existed = path.exists()
        if existed and not path.is_file():
            raise RequestError(f"{path} is no file: name one to write")
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot write {path!s:.100}: {_reason(error)}; name another place") from None


def check_new_file(path: Path) -> None:
    """Check that a file can be written that is not there yet; leaves nothing behind.

    Raises:
        RequestError: it cannot, or is there.
    """
    if path.exists():
        raise RequestError(f"{path} exists: name another file with --out, or remove it")
    check_output(path)


def check_new_folder(path: Path) -> None:
    """Check that files can be written into a folder, which may have to be made; leaves nothing behind.

    Raises:
        RequestError: they cannot.
    """
    made = []
    try:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir()
            made.append(each)
        probe = path / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"cannot write into {path!s:.100}: {_reason(error)}; name another folder with --out"
        ) from None
    finally:
        for each in reversed(made):
            os.rmdir(each)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
