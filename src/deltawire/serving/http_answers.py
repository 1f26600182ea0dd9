"""Asks other servers, and reads their answers: never more bytes than the caller allows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from deltawire.errors import CorruptError
from deltawire.wire.objects import prepared

T = TypeVar("T")


def http_parts(url: str) -> SplitResult | None:
    """Returns the parts of an ``http://`` or ``https://`` URL with a host; None for any other."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    return None


async def post_json(
    session: aiohttp.ClientSession,
    url: str,
    body: Any,
    kind: type[T],
    *,
    key: str,
    limit: int,
    within_s: float,
) -> T:
    """Posts JSON and returns the answer, of at most ``limit`` bytes. ``key`` is sent as a bearer
    token; a redirect is not followed. Raises `CorruptError` for every other outcome than a sound
    answer with status 200 within ``within_s`` seconds."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = msgspec.json.encode(body)
    try:
        async with (
            asyncio.timeout(within_s),
            session.post(url, data=data, headers=headers, allow_redirects=False) as answer,
        ):
            found = await read_limited(answer.content, limit)
            if answer.status != 200:
                raise CorruptError(f"status {answer.status}")
        return msgspec.json.decode(found, type=prepared(kind))
    except (
        aiohttp.ClientError,
        OSError,
        TimeoutError,
        msgspec.MsgspecError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        raise CorruptError(type(error).__name__) from error


async def read_limited(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Returns an answer's whole body; raises `CorruptError` beyond ``limit`` bytes. The caller
    limits the time."""
    data = bytearray()
    async for piece in content.iter_any():
        data += piece
        if len(data) > limit:
            raise CorruptError(f"an answer of more than {limit} bytes")
    return bytes(data)
