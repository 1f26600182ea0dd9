"""Storing: puts rows into a compacted segment, so that no erasure at the same time misses them.

::

    this process                                   an erasure
      announce the name                              create the record of the user
      read who was forgotten, leave them out         list announcements; where there is no segment,
      create the index                                 create a void one, and a void index
      create the segment                             list segments and indexes again; segments with
      read both back, end the announcement             the user are stored without it

If the erasure lists before the announcement is there, its record is there before who was forgotten
is read. If it lists later, it finds the announcement: then either its void objects come first, and
this process starts again under another name, or the segment does, and the erasure replaces it.
Nothing depends on this process living on: one that is killed anywhere leaves nothing of a user who
was forgotten.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from deltawire.errors import UnreadableError
from deltawire.live.compaction.stream_rows import StreamRows
from deltawire.runtime.compacted_segments import require_compacted, require_index
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.compacted import (
    CompactedIndex,
    CompactedName,
    NumberedRow,
    encode_compacted,
    encode_index,
)

SO = "nothing was replaced"
ATTEMPTS = 64
"""More erasures than this while one segment is stored mean that something else is wrong."""


def store_compacted(
    bucket: Bucket, rows_of: StreamRows, owner: str, rows: Sequence[NumberedRow]
) -> CompactedName | None:
    """Stores rows, without users who were forgotten, as a new compacted segment and its index.

    Returns its name, after it was read back whole; None if no row is left. The objects that were
    read for it may be deleted then. Raises `RetryError` and `UnreadableError`; the rows are then
    still where they came from, and the same call may be made again.
    """
    rows = rows_of.distinct(rows)
    if not rows:
        return None
    numbers = [row.number for row in rows]
    for _ in range(ATTEMPTS):
        name = keys.live_compacted_name(min(numbers), max(numbers), secrets.token_hex(16))
        place = CompactedName(rows_of.stream, owner, name)
        bucket.create(place.announcement_key, b"")
        kept = list(rows_of.without_forgotten(bucket, rows))
        if kept and not _store(bucket, rows_of, place, kept):
            continue  # An erasure made both void; they stay until they are old.
        bucket.delete(place.announcement_key)
        return place if kept else None
    raise UnreadableError(
        "rows cannot be stored: others void each attempt",
        hint="run the command again once no erasure runs",
        run=bucket.url,
        key=keys.live_compacted(rows_of.stream, owner),
    )


def _store(
    bucket: Bucket, rows_of: StreamRows, place: CompactedName, rows: list[NumberedRow]
) -> bool:
    """Creates index and segment; returns whether both were read back as they should be."""
    index = _index_of(rows_of, place, rows)
    bucket.create(place.index_key, encode_index(index))
    if require_index(bucket, place, so=SO) != index:
        return False
    bucket.create(place.key, encode_compacted(place, rows))
    if require_compacted(bucket, place, so=SO) == rows:
        return True
    bucket.delete(place.index_key)
    return False


def replace_compacted(
    bucket: Bucket, rows_of: StreamRows, place: CompactedName, rows: Sequence[NumberedRow]
) -> CompactedName | None:
    """Stores ``rows`` in place of a compacted segment, then deletes it; raises as
    `store_compacted`."""
    made = store_compacted(bucket, rows_of, place.owner, rows)
    delete_compacted(bucket, place)
    return made


def delete_compacted(bucket: Bucket, place: CompactedName) -> None:
    """Deletes a compacted segment and then its index."""
    bucket.delete(place.key)
    bucket.delete(place.index_key)


def void_pending(bucket: Bucket, place: CompactedName) -> None:
    """Makes sure that a writer that has announced a segment and not stored it will not store it:
    creates a void segment and index in its place. One that is there already stays."""
    bucket.create(place.key, encode_compacted(place, []))
    if require_compacted(bucket, place):
        return
    void = CompactedIndex(
        stream=place.stream, owner=place.owner, name=place.name, rows=0, oldest=0.0, newest=0.0
    )
    bucket.create(place.index_key, encode_index(void))
    if require_index(bucket, place) != void:  # The writer's, whose segment never comes.
        bucket.delete(place.index_key)


def _index_of(
    rows_of: StreamRows, place: CompactedName, rows: Sequence[NumberedRow]
) -> CompactedIndex:
    times = [rows_of.at(row) for row in rows]
    return CompactedIndex(
        stream=place.stream,
        owner=place.owner,
        name=place.name,
        rows=len(rows),
        oldest=min(times),
        newest=max(times),
        users=sorted({user for row in rows for user in rows_of.users(row)}),
    )
