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


def owners_to_erase(
    bucket: Bucket,
    stream: Stream,
    users: Set[str],
    *,
    pending_of: Container[str] | None,
    without: Container[str] = (),
) -> set[str]:
    """Returns the gateways or learners of whose compacted segments an index names one of ``users``,
    and those of ``pending_of`` (None: all) with a segment that is announced and not stored. Indexes
    of those in ``without`` are not read.

    Their rows may show no user any more: a process that was killed may have deleted a segment and
    not its index. Raises `UnreadableError` for an index that cannot be read.
    """
    found = set[str]()
    for owner in compacted_owners(bucket, stream):
        if owner in without:
            continue
        listing = list_compacted(bucket, stream, owner)
        pending = listing.pending.keys() - listing.segments.keys()
        indexes = (require_index(bucket, place) for place in listing.indexes)
        if (pending and (pending_of is None or owner in pending_of)) or any(
            one is not None and not users.isdisjoint(one.users) for one in indexes
        ):
            found.add(owner)
    return found


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
