"""What lies where in tar shards, as WebDataset has them: `key.jpg` beside `key.cls`, one record a key.

The headers of every shard are read once; what was found is remembered in the user's cache, by the files' sizes and
times. So records can be read at any place, and a shard is still read from front to back where the order says so.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from polyrhythm.data.files.cache import cache_folder, write_whole
from polyrhythm.data.pictures.images import suffixes
from polyrhythm.errors import RequestError

_LABELS = (".cls", ".txt", ".json")
_LONGEST_LABEL_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """An image in a shard.

    Attributes:
        shard: number of the file.
        name: of the image inside it.
        offset: where its bytes begin.
        size: how many there are.
        label: as it is written there.
    """

    shard: int
    name: str
    offset: int
    size: int
    label: str


@dataclass(frozen=True)
class TarIndex:
    """What shards hold.

    Attributes:
        records: in the order of the shards, and inside each as they lie.
        faults: what could not be made sense of, one line each.
    """

    records: tuple[Record, ...]
    faults: tuple[str, ...]


def index_shards(shards: Sequence[Path]) -> TarIndex:
    """Lists the records of shards.

    Raises:
        RequestError: a file cannot be read, or is no tar file.
    """
    memory = cache_folder() / "shards" / f"{_fingerprint(shards)}.json"
    try:
        known = json.loads(memory.read_text())
        return TarIndex(tuple(Record(**entry) for entry in known["records"]), tuple(known["faults"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    records: list[Record] = []
    faults: list[str] = []
    for number, shard in enumerate(shards):
        _index(number, shard, records, faults)
    found = TarIndex(tuple(records), tuple(faults))
    try:
        write_whole(memory, json.dumps(asdict(found)).encode())
    except OSError:
        return found  # only speed is lost
    return found


def _fingerprint(shards: Sequence[Path]) -> str:
    digest = sha256()
    for path in shards:
        try:
            status = path.stat()
        except OSError as error:
            raise RequestError(f"the shard {path} cannot be read ({error.strerror})") from None
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _index(number: int, shard: Path, records: list[Record], faults: list[str]) -> None:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with shard.open("rb") as file:
            for member in _members(file, shard, faults):
                key, suffix = _split(member.name)
                if suffix in suffixes():
                    images[key] = member
                elif suffix in _LABELS and member.size <= _LONGEST_LABEL_BYTES:
                    label = _label(file, member, suffix)
                    labels.update({} if label is None else {key: label})
    except OSError as error:
        raise RequestError(f"the shard {shard} cannot be read ({error.strerror})") from None
    for key, member in images.items():
        if key in labels:
            place = (member.offset_data, member.size, labels[key])
            records.append(Record(number, member.name, *place))
        else:
            faults.append(f"{shard}: {member.name} has no label beside it")


def _members(file: IO[bytes], shard: Path, faults: list[str]) -> Iterator[tarfile.TarInfo]:
    length = file.seek(0, 2)
    file.seek(0)
    try:
        opened = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - it holds no file of its own
    except tarfile.TarError:
        raise RequestError(f"{shard} is no uncompressed tar file: give one made by tar -cf") from None
    try:
        for member in opened:
            if member.offset_data + member.size > length:
                faults.append(f"{shard} is cut short in {member.name}")
            elif member.isfile():
                yield member
    except tarfile.TarError as error:
        faults.append(f"{shard} is damaged ({error})")


def _split(name: str) -> tuple[str, str]:
    """Splits `folder/key.suffix` at the first point of its last part, as WebDataset does."""
    folder, slash, last = name.rpartition("/")
    key, _, suffix = last.partition(".")
    return f"{folder}{slash}{key}", f".{suffix.lower()}"


def _label(file: IO[bytes], member: tarfile.TarInfo, suffix: str) -> str | None:
    before = file.tell()
    file.seek(member.offset_data)
    content = file.read(member.size)
    file.seek(before)
    try:
        text = content.decode("utf-8").strip()
        if suffix == ".json":
            found = json.loads(text)
            text = str(found["label"]) if isinstance(found, dict) and "label" in found else ""
    except ValueError:
        return None
    return text or None
