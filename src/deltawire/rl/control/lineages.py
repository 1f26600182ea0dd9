"""Lineages: reads which answers each learner's groups were made of.

A lineage is at its own key first, and later in a compacted segment with many
(`deltawire.wire.compacted`). The segment is stored before the key is deleted, and a larger segment
before those that it is made of. So readers look at the keys first, and look again where a segment
that was listed is gone. A lineage in a compacted segment counts before one at its key.
"""

from __future__ import annotations

from collections.abc import Collection

from deltawire.errors import CorruptError, UnreadableError
from deltawire.runtime.compacted_segments import (
    compacted_owners,
    list_compacted,
    newer_than,
    read_compacted,
    require_compacted,
    require_index,
)
from deltawire.store import Bucket, in_parallel
from deltawire.sync.chain.evidence import (
    Absent,
    Sound,
    evidence_of,
    listed_twice,
    require_agreed,
    unreadable,
)
from deltawire.wire import keys
from deltawire.wire.compacted import CompactedName, NumberedRow
from deltawire.wire.lineage import MAX_FORGOTTEN_BYTES, MAX_LINEAGE_BYTES, Forgotten, Lineage
from deltawire.wire.objects import decode_json

READERS = 16
"""Lineages that an erasure reads at a time."""
PASSES = 16
"""A learner does not replace all its compacted segments more often while one reads them."""
Place = tuple[str, int]
"""A group: its worker and its sequence number."""


def read_lineage(bucket: Bucket, worker: str, sequence: int) -> Lineage | None:
    """Reads the lineage of a group; None if there is none. Raises `CorruptError`."""
    key = keys.live_lineage(worker, sequence)
    for _ in range(PASSES):
        found = _lineages_of(bucket, key, bucket.get(key, limit=MAX_LINEAGE_BYTES))
        if found:
            return found[0]
        names = newer_than(bucket, "lineage", worker, sequence - 1 if sequence else None)
        gone = False
        for name in names:
            first, last = name.span
            if not first <= sequence <= last:
                continue
            rows = read_compacted(bucket, name)
            gone = gone or rows is None
            for lineage in _in_segment(bucket, name, rows or ()):
                if lineage.sequence == sequence:
                    return lineage
        if not gone:
            return None
    return None


def read_lineages(bucket: Bucket) -> list[Lineage]:
    """Reads all lineages of a run, by worker and number; those that no connection delivers whole
    are left out, since otherwise any writer could stop every learner."""
    found: dict[Place, Lineage] = {}
    unread = []
    for key in bucket.list(keys.LIVE_LINEAGE):
        try:
            read = _lineages_of(bucket, key, bucket.get(key, limit=MAX_LINEAGE_BYTES))
        except CorruptError:
            read = []  # It is read again below.
        unread += [] if read else [key]
        found |= {(one.worker, one.sequence): one for one in read}
    for owner in compacted_owners(bucket, "lineage"):
        seen: set[CompactedName] = set()
        for _ in range(PASSES):
            new = [one for one in newer_than(bucket, "lineage", owner, None) if one not in seen]
            seen.update(new)
            gone = False
            for name in new:

                def read_all(name: CompactedName = name) -> list[Lineage] | None:
                    rows = read_compacted(bucket, name)
                    return None if rows is None else _in_segment(bucket, name, rows)

                evidence = evidence_of(bucket, name.key, read_all)
                gone = gone or isinstance(evidence, Absent)
                for one in evidence.value if isinstance(evidence, Sound) else []:
                    found[one.worker, one.sequence] = one
            if not gone:
                break
    for key in unread:
        if keys.lineage_of(key) not in found:

            def read_again(key: str = key) -> list[Lineage] | None:
                data = bucket.get(key, limit=MAX_LINEAGE_BYTES)
                return None if data is None else _lineages_of(bucket, key, data)

            evidence = evidence_of(bucket, key, read_again)
            for one in evidence.value if isinstance(evidence, Sound) else []:
                found[one.worker, one.sequence] = one
    return [found[place] for place in sorted(found)]


def require_lineages(
    bucket: Bucket, *, users: Collection[str], without: Collection[str] = ()
) -> list[Lineage]:
    """Reads all lineages that hold one of these ``users``, for a caller that deletes by them. Of
    compacted ones the indexes tell which segments to read.

    Those of the workers in ``without`` are not read. Raises `UnreadableError` for an object that
    cannot be read.
    """

    def read(key: str) -> list[Lineage]:
        data = require_agreed(bucket, key, limit=MAX_LINEAGE_BYTES)
        try:
            return _lineages_of(bucket, key, data)
        except CorruptError as error:  # Two answers agree: the object is no lineage.
            raise unreadable(bucket, key, error) from error

    left_out = tuple(f"{keys.LIVE_LINEAGE}{name}/" for name in without)
    everything = listed_twice(bucket, keys.LIVE_LINEAGE)
    listed = [key for key in everything if not key.startswith(left_out)]
    every = [one for found in in_parallel(bucket, read, listed, at_once=READERS) for one in found]
    found = {(one.worker, one.sequence): one for one in every}
    for owner in compacted_owners(bucket, "lineage"):
        if owner not in without:
            compacted = _require_compacted(bucket, owner, users)
            found |= {(one.worker, one.sequence): one for one in compacted}
    wanted = frozenset(users)
    return [
        one
        for _, one in sorted(found.items())
        if not wanted.isdisjoint(answer.user for answer in one.answers)
    ]


def _require_compacted(bucket: Bucket, owner: str, users: Collection[str]) -> list[Lineage]:
    found: list[Lineage] = []
    seen: set[CompactedName] = set()
    for _ in range(PASSES):
        listing = list_compacted(bucket, "lineage", owner)
        gone = False
        for name in listing.segments:
            if name in seen:
                continue
            seen.add(name)
            index = require_index(bucket, name) if name in listing.indexes else None
            if index is not None and set(users).isdisjoint(index.users):
                continue
            rows = require_compacted(bucket, name)
            gone = gone or rows is None
            try:
                found += _in_segment(bucket, name, rows or ())
            except CorruptError as error:
                raise unreadable(bucket, name.key, error) from error
        if not gone:
            return found
    raise UnreadableError(
        "the lineages of a learner are replaced faster than they are read, so nothing was deleted",
        hint="run the command again",
        run=bucket.url,
        key=keys.live_compacted("lineage", owner),
    )


def decode_lineages(
    rows: Collection[NumberedRow], worker: str, *, run: str, key: str
) -> list[Lineage]:
    """Returns the lineages of a worker's groups in an object; raises `CorruptError` for a row that
    is none, or that of another group."""
    found = []
    for row in rows:
        lineage = decode_json(row.data, Lineage, run=run, key=key)
        if (lineage.worker, lineage.sequence) != (worker, row.number):
            raise CorruptError("the lineage of another group", run=run, key=key)
        found.append(lineage)
    return found


def _in_segment(
    bucket: Bucket, name: CompactedName, rows: Collection[NumberedRow]
) -> list[Lineage]:
    return decode_lineages(rows, name.owner, run=bucket.url, key=name.key)


def _lineages_of(bucket: Bucket, key: str, data: bytes | None) -> list[Lineage]:
    """Returns the lineage that an object holds; none if it is gone, or a copy under another key."""
    if data is None:
        return []
    lineage = decode_json(data, Lineage, run=bucket.url, key=key)
    place = keys.lineage_of(key)
    # The key is checked first: no valid key can be made of an invalid name in the content.
    return [lineage] if place == (lineage.worker, lineage.sequence) else []


def erased_groups(bucket: Bucket) -> set[Place]:
    """Returns the groups that held answers of users who were forgotten, each as its worker and its
    number; raises `CorruptError`."""
    return {
        place
        for key in bucket.list(keys.LIVE_FORGOTTEN)
        if (data := bucket.get(key, limit=MAX_FORGOTTEN_BYTES)) is not None
        for place in decode_json(data, Forgotten, run=bucket.url, key=key).groups
    }
