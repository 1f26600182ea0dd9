"""Lineages: reads which answers each learner's groups were made of."""

from __future__ import annotations

from collections.abc import Collection

from deltawire.errors import CorruptError
from deltawire.store import Bucket, in_parallel
from deltawire.sync.chain.evidence import (
    Sound,
    evidence_of,
    listed_twice,
    require_agreed,
    unreadable,
)
from deltawire.wire import keys
from deltawire.wire.lineage import MAX_FORGOTTEN_BYTES, MAX_LINEAGE_BYTES, Forgotten, Lineage
from deltawire.wire.objects import decode_json

READERS = 16
"""Lineages that an erasure reads at a time."""


def read_lineage(bucket: Bucket, key: str) -> list[Lineage]:
    """Reads the lineage at a key; none if it is gone, or a copy under another key. Raises
    `CorruptError`."""
    return _lineages_of(bucket, key, bucket.get(key, limit=MAX_LINEAGE_BYTES))


def read_lineages(bucket: Bucket) -> list[Lineage]:
    """Reads all lineages of a run, by worker and number; those that no connection delivers whole
    are left out, since otherwise any writer could stop every learner."""
    found: list[Lineage] = []
    for key in bucket.list(keys.LIVE_LINEAGE):

        def read(key: str = key) -> list[Lineage] | None:
            data = bucket.get(key, limit=MAX_LINEAGE_BYTES)
            return None if data is None else _lineages_of(bucket, key, data)

        evidence = evidence_of(bucket, key, read)
        found += evidence.value if isinstance(evidence, Sound) else []
    return found


def require_lineages(bucket: Bucket, *, without: Collection[str] = ()) -> list[Lineage]:
    """Reads all lineages as `read_lineages`, for a caller whom each one decides what to delete.

    Those of the workers in ``without`` are not read. Raises `UnreadableError` for one that cannot
    be read.
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
    return [one for found in in_parallel(bucket, read, listed, at_once=READERS) for one in found]


def _lineages_of(bucket: Bucket, key: str, data: bytes | None) -> list[Lineage]:
    """Returns the lineage that an object holds; none if it is gone, or a copy under another key."""
    if data is None:
        return []
    lineage = decode_json(data, Lineage, run=bucket.url, key=key)
    return [lineage] if key == keys.live_lineage(lineage.worker, lineage.sequence) else []


def erased_groups(bucket: Bucket) -> set[tuple[str, int]]:
    """Returns the groups that held answers of users who were forgotten, each as its worker and its
    number; raises `CorruptError`."""
    return {
        place
        for key in bucket.list(keys.LIVE_FORGOTTEN)
        if (data := bucket.get(key, limit=MAX_FORGOTTEN_BYTES)) is not None
        for place in decode_json(data, Forgotten, run=bucket.url, key=key).groups
    }
