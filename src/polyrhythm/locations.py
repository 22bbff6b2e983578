"""Locations of fsspec: object stores, HDFS, HTTP, another disk; see https://filesystem-spec.readthedocs.io."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyrhythm.errors import RequestError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def file_system(url: str, what: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a location, and the path in it; nothing is sent yet.

    Args:
        url: location, as fsspec reads it.
        what: description of the location, for errors.

    Raises:
        RequestError: fsspec knows no such file system, or a package for it is missing.
    """
    from fsspec.core import url_to_fs  # a dependency of torch, which takes time to import

    try:
        found: tuple[Any, str] = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise RequestError(
            f"cannot use the {what} {url!r}: {error}; write a location of fsspec, such as s3://bucket/{what} or "
            f"file:///mnt/disk/{what}"
        ) from None
    return found[0], found[1].rstrip("/")
