"""Carries bytes between two connections until both sides have said all."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_PIECE_BYTES = 1 << 16


async def relay(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    second: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Passes on what comes over either connection; returns when one of them has broken, or both have ended."""
    ways = [
        asyncio.create_task(_carry(first[0], second[1])),
        asyncio.create_task(_carry(second[0], first[1])),
    ]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (first, second):
            hang_up(writer)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


def hang_up(writer: asyncio.StreamWriter) -> None:
    """Ends a connection; the other side hears of it even where a forked process has a copy of the socket."""
    with suppress(OSError, RuntimeError):
        writer.write_eof()
    writer.close()
