"""Erasing: takes users out of the compacted segments of a stream (`storing` has the protocol)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Set

from deltawire.live.compaction.storing import replace_compacted, void_pending
from deltawire.live.compaction.stream_rows import StreamRows
from deltawire.runtime.compacted_segments import (
    CompactedListing,
    compacted_owners,
    list_compacted,
    require_index,
)
from deltawire.store import Bucket
from deltawire.wire.compacted import CompactedName, Stream


def erase_compacted(bucket: Bucket, rows_of: StreamRows, users: Set[str]) -> Counter[str]:
    """Takes ``users`` out of all compacted segments of a stream; returns in how many rows each was.

    Reads the indexes, and only the segments that hold one of the users. Raises `UnreadableError`
    for an object that cannot be read, because it may hold one.
    """
    found: Counter[str] = Counter()
    for owner in compacted_owners(bucket, rows_of.stream):
        found += erase_owner(bucket, rows_of, owner, users)
    return found


def erase_owner(bucket: Bucket, rows_of: StreamRows, owner: str, users: Set[str]) -> Counter[str]:
    """Takes ``users`` out of the compacted segments of one gateway or learner, as
    `erase_compacted`."""
    found: Counter[str] = Counter()
    listing = list_compacted(bucket, rows_of.stream, owner)
    if pending := listing.pending.keys() - listing.segments.keys():
        for place in pending:
            void_pending(bucket, place)
        # Their writers may have come first. Later announcements have none of the users.
        listing = list_compacted(bucket, rows_of.stream, owner)
    for place in listing.names:
        if _may_hold(bucket, listing, place, users):
            found += _erase(bucket, rows_of, place, users)
    return found


def announcing_owners(bucket: Bucket, stream: Stream, *, within: Container[str] | None) -> set[str]:
    """Returns the gateways or learners, of those ``within`` (None: all), with a segment that is
    announced and not stored: its writer may have been killed, or store it yet."""
    found = set[str]()
    for owner in compacted_owners(bucket, stream):
        if within is None or owner in within:
            listing = list_compacted(bucket, stream, owner)
            if listing.pending.keys() - listing.segments.keys():
                found.add(owner)
    return found


def delete_orphaned_indexes(
    bucket: Bucket, rows_of: StreamRows, users: Set[str], *, without: Container[str]
) -> None:
    """Deletes indexes that name one of ``users`` and whose segment is gone or void, but for those
    of the owners in ``without``: a process was killed between the two. It writes nothing.

    Raises `UnreadableError` for an object that cannot be read.
    """
    for owner in compacted_owners(bucket, rows_of.stream):
        if owner in without:
            continue
        for place in list_compacted(bucket, rows_of.stream, owner).indexes:
            index = require_index(bucket, place)
            named = index is not None and not users.isdisjoint(index.users)
            if named and not rows_of.compacted(bucket, place):
                bucket.delete(place.index_key)


def _may_hold(
    bucket: Bucket, listing: CompactedListing, place: CompactedName, users: Set[str]
) -> bool:
    """Returns whether a segment, there or still to come, may hold one of the users."""
    if place not in listing.indexes:
        return True
    index = require_index(bucket, place)
    return index is None or not users.isdisjoint(index.users)


def _erase(
    bucket: Bucket, rows_of: StreamRows, place: CompactedName, users: Set[str]
) -> Counter[str]:
    rows = rows_of.compacted(bucket, place)
    if not rows:
        # Void, or deleted after its rows were stored elsewhere: the index must not stay.
        bucket.delete(place.index_key)
        return Counter()
    left = rows_of.without(rows, users)
    if left is rows:
        return Counter()
    found = Counter(user for row in rows for user in rows_of.users(row) if user in users)
    replace_compacted(bucket, rows_of, place, left)
    return found
