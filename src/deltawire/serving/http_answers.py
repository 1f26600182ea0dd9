"""Reads answers of other servers: never more bytes than the caller allows."""

from __future__ import annotations

import aiohttp

from deltawire.errors import CorruptError


async def read_limited(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Returns an answer's whole body; raises `CorruptError` beyond ``limit`` bytes. The caller
    limits the time."""
    data = bytearray()
    async for piece in content.iter_any():
        data += piece
        if len(data) > limit:
            raise CorruptError(f"an answer of more than {limit} bytes")
    return bytes(data)
