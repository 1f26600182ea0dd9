"""Stored rows: all segments of captures or feedback, read so that none is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from deltawire.errors import CorruptError, RetryError
from deltawire.runtime.compacted_segments import (
    compacted_owners,
    list_compacted,
    require_compacted,
    require_index,
)
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, require_agreed
from deltawire.wire import keys
from deltawire.wire.captures import (
    MAX_SEGMENT_BYTES,
    Capture,
    Feedback,
    decode_rows,
    decode_segment,
)
from deltawire.wire.compacted import CompactedName, Stream

R = TypeVar("R", bound=Capture | Feedback)


def require_rows(
    bucket: Bucket, prefix: str, kind: type[R]
) -> Iterator[tuple[str, str, int, list[R]]]:
    """Yields key, gateway, number and rows of each segment below ``prefix`` that is not compacted.

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
            raise _unread(bucket, key, error) from error
        yield key, gateway, number, rows


def require_rows_of(
    bucket: Bucket, stream: Stream, kind: type[R], users: frozenset[str]
) -> Iterator[tuple[str, R]]:
    """Yields gateway and row of everything that is stored of ``users`` in a stream, each row once:
    first from segments, then from compacted ones, into which they may move meanwhile.

    Of those it reads the indexes, and the ones that hold a user. Raises as `require_rows`.
    """
    seen: set[tuple[str, ...]] = set()
    for gateway, row in _rows_of(bucket, stream, kind, users):
        name = (row.answer, *(row.identity if isinstance(row, Feedback) else ()))
        if row.user in users and name not in seen:
            seen.add(name)
            yield gateway, row


def _rows_of(
    bucket: Bucket, stream: Stream, kind: type[R], users: frozenset[str]
) -> Iterator[tuple[str, R]]:
    for _, gateway, _, rows in require_rows(bucket, f"{keys.LIVE}{stream}/", kind):
        yield from ((gateway, row) for row in rows)
    for owner in compacted_owners(bucket, stream):
        read: set[CompactedName] = set()
        merged = True
        while merged:  # Rows that are gone are in another object, stored before.
            listing = list_compacted(bucket, stream, owner)
            merged = False
            for place in listing.names:
                if place in read:
                    continue
                read.add(place)
                index = require_index(bucket, place, so="nothing was exported")
                if index is not None and users.isdisjoint(index.users):
                    continue
                found = _compacted(bucket, place, kind)
                merged |= found is None and place in listing.segments
                yield from ((owner, row) for row in found or ())


def _compacted(bucket: Bucket, place: CompactedName, kind: type[R]) -> list[R] | None:
    found = require_compacted(bucket, place, so="nothing was exported")
    if found is None:
        return None
    try:
        return decode_rows([row.data for row in found], kind, run=bucket.url, key=place.key)
    except CorruptError as error:
        raise _unread(bucket, place.key, error) from error


def _unread(bucket: Bucket, key: str, error: CorruptError) -> RetryError:
    return RetryError(
        f"a segment cannot be read, so it may hold the user's data: {error.message}",
        hint="delete the object if it is not the gateway's, then run the command again",
        run=bucket.url,
        key=key,
    )
