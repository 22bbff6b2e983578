"""Files whose content is known beforehand by its sha256; they lie in a folder as they are, or gzipped."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from polyrhythm.errors import RequestError

GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class VerifiedFile:
    """A file that must be exactly one content.

    Attributes:
        name: of the file, without `.gz`.
        size_bytes: uncompressed.
        sha256: of the uncompressed bytes, in hexadecimal.
    """

    name: str
    size_bytes: int
    sha256: str

    def unpack(self, packed: bytes, origin: str) -> bytes:
        """Uncompresses and verifies.

        Raises:
            RequestError: `packed` is not gzip, or not of this content; `origin` says where it came from.
        """
        try:
            # Bounded, so that a hostile file cannot fill the memory.
            content = zlib.decompressobj(GZIP).decompress(packed, self.size_bytes + 1)
        except zlib.error:
            raise RequestError(f"{origin} is damaged (not a whole gzip file): fetch it anew") from None
        return self.verify(content, origin)

    def verify(self, content: bytes, origin: str) -> bytes:
        """Gives `content` back if it is what it must be.

        Raises:
            RequestError: it is not; `origin` says where it came from.
        """
        found = sha256(content).hexdigest()
        if found != self.sha256:
            raise RequestError(
                f"{origin} is damaged (sha256 {found[:16]}…, not {self.sha256[:16]}…): fetch it anew"
            )
        return content

    def read(self, folder: Path) -> bytes:
        """Reads it from a folder, as it is or gzipped.

        Raises:
            RequestError: it is not there, cannot be read or is not of this content.
        """
        plain, packed = folder / self.name, folder / f"{self.name}.gz"
        try:
            if plain.is_file():
                return self.verify(plain.read_bytes(), str(plain))
            return self.unpack(packed.read_bytes(), str(packed))
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestError(f"{packed} cannot be read ({reason}): put it, or {self.name}, there") from None


def read_all(folder: Path, files: Sequence[VerifiedFile]) -> list[bytes]:
    """Reads all of `files` from a folder, in their order, uncompressed and verified.

    Raises:
        RequestError: one is not there, cannot be read or is not what it must be.
    """
    return [file.read(folder) for file in files]
