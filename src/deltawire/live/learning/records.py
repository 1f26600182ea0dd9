"""Records: reads the answers and the feedback that gateways stored, each segment once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from contextlib import suppress

from deltawire.errors import CorruptError
from deltawire.live.forgotten import forgotten_users
from deltawire.store import Bucket, in_parallel
from deltawire.sync.chain.evidence import listed_twice, require_agreed, unreadable
from deltawire.wire import keys
from deltawire.wire.captures import (
    MAX_SEGMENT_BYTES,
    Capture,
    Feedback,
    Source,
    decode_segment,
)
from deltawire.wire.lineage import MAX_LINEAGE_BYTES, Lineage
from deltawire.wire.objects import decode_json

READERS = 16
"""Lineages that an erasure reads at a time."""


class LiveRecords:
    """Answers by id, and the reports about each by their id.

    An answer or a report that two segments hold counts once: the first that was read. Rows of users
    that were forgotten do not count. ``counts`` are totals of rows.

    Example::

        records = LiveRecords(bucket)
        records.poll()
        records.answers["…"], records.reports["…"]
    """

    def __init__(self, bucket: Bucket) -> None:
        self.answers: dict[str, Capture] = {}
        self.reports: dict[str, dict[tuple[Source, str], Feedback]] = {}
        self.forgotten: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._bucket = bucket
        self._read: dict[str, str] = {}

    def poll(self) -> int:
        """Reads new segments, and returns how many rows were new. Raises `RetryError`."""
        self.poll_forgotten()
        return self._poll(keys.LIVE_CAPTURES, Capture) + self._poll(keys.LIVE_FEEDBACK, Feedback)

    def poll_forgotten(self) -> frozenset[str]:
        """Drops the rows of users who were forgotten, and returns those that are new. Raises
        `RetryError`."""
        gone = forgotten_users(self._bucket) - self.forgotten
        if gone:
            self.forgotten |= gone
            self._drop(gone)
        return gone

    def _poll(self, prefix: str, kind: type[Capture] | type[Feedback]) -> int:
        found = 0
        for gateway in self._bucket.list_prefixes(prefix):
            place = f"{prefix}{gateway}/"
            for key in self._bucket.list(place, after=self._read.get(place)):
                found += self._read_segment(key, gateway, kind)
                self._read[place] = key
        return found

    def _read_segment(self, key: str, gateway: str, kind: type[Capture] | type[Feedback]) -> int:
        number = keys.trailing_number(key)
        try:
            data = self._bucket.get(key, limit=MAX_SEGMENT_BYTES)
            if data is None or number is None:
                return 0
            rows = decode_segment(
                data, kind, gateway=gateway, number=number, run=self._bucket.url, key=key
            )
        except CorruptError:
            self.counts["damaged_segments"] += 1
            return 0
        return sum(self._add(row) for row in rows)

    def _add(self, row: Capture | Feedback) -> bool:
        if row.user in self.forgotten and row.user:
            return False
        if isinstance(row, Capture):
            if row.answer in self.answers:
                return False
            self.answers[row.answer] = row
            self.counts["answers"] += 1
            return True
        about = self.reports.setdefault(row.answer, {})
        if row.identity in about:
            return False
        about[row.identity] = row
        self.counts["reports"] += 1
        return True

    def _drop(self, users: Set[str]) -> None:
        for answer in [a for a, row in self.answers.items() if row.user in users]:
            del self.answers[answer]
        for answer, about in list(self.reports.items()):
            kept = {name: row for name, row in about.items() if row.user not in users}
            self.reports[answer] = kept


def read_lineages(bucket: Bucket) -> list[Lineage]:
    """Reads all lineages of a run, by worker and number; damaged ones are left out."""
    found = []
    for key in bucket.list(keys.LIVE_LINEAGE):
        with suppress(CorruptError):  # Otherwise any writer could stop every learner.
            data = bucket.get(key, limit=MAX_LINEAGE_BYTES)
            found += _lineages_of(bucket, key, data)
    return found


def require_lineages(bucket: Bucket) -> list[Lineage]:
    """Reads all lineages as `read_lineages`, for a caller whom each one decides what to delete.

    Raises `UnreadableError` for one that cannot be read.
    """

    def read(key: str) -> list[Lineage]:
        data = require_agreed(bucket, key, limit=MAX_LINEAGE_BYTES)
        try:
            return _lineages_of(bucket, key, data)
        except CorruptError as error:
            raise unreadable(bucket, key, error) from error

    listed = listed_twice(bucket, keys.LIVE_LINEAGE)
    return [one for found in in_parallel(bucket, read, listed, at_once=READERS) for one in found]


def _lineages_of(bucket: Bucket, key: str, data: bytes | None) -> list[Lineage]:
    """Returns the lineage that an object holds; none if it is gone, or a copy under another key."""
    if data is None:
        return []
    lineage = decode_json(data, Lineage, run=bucket.url, key=key)
    return [lineage] if key == keys.live_lineage(lineage.worker, lineage.sequence) else []
