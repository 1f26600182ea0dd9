"""Stored rows: all segments of captures or feedback, read so that none is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from deltawire.errors import CorruptError, RetryError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, require_agreed
from deltawire.wire import keys
from deltawire.wire.captures import MAX_SEGMENT_BYTES, Capture, Feedback, decode_segment

R = TypeVar("R", bound=Capture | Feedback)


def require_rows(
    bucket: Bucket, prefix: str, kind: type[R]
) -> Iterator[tuple[str, str, int, list[R]]]:
    """Yields key, gateway, number and rows of each segment below ``prefix``.

    Raises `RetryError` for one that cannot be read, because it may hold what is looked for.
    """
    for key in listed_twice(bucket, prefix):
        gateway, _, _ = key.removeprefix(prefix).partition("/")
        number = keys.trailing_number(key)
        if number is None:
            continue
        data = require_agreed(bucket, key, limit=MAX_SEGMENT_BYTES)
        if data is None:
            continue
        try:
            rows = decode_segment(
                data, kind, gateway=gateway, number=number, run=bucket.url, key=key
            )
        except CorruptError as error:
            raise RetryError(
                f"a segment cannot be read, so it may hold the user's data: {error.message}",
                hint="delete the object if it is not the gateway's, then run the command again",
                run=bucket.url,
                key=key,
            ) from error
        yield key, gateway, number, rows
