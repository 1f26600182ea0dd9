"""Records: reads the answers and the feedback that gateways stored, each segment once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from deltawire.errors import CorruptError
from deltawire.live.forgotten import forgotten_users
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import (
    MAX_SEGMENT_BYTES,
    Capture,
    Feedback,
    Source,
    decode_segment,
)


class LiveRecords:
    """Answers by id, and the reports about each by their id.

    An answer or a report that two segments hold counts once: the first that was read. Rows of users
    that were forgotten do not count, nor do answers that may not be stored, of which a row only
    judges their arm, unless ``judges``. ``counts`` are totals of rows. Segments that cannot be read
    are read again by each poll, and are the ``alarm``.

    Example::

        records = LiveRecords(bucket)
        records.poll()
        records.answers["…"], records.reports["…"]
    """

    judges = False
    """Answers that may not be stored count too: in canaries only."""

    def __init__(self, bucket: Bucket) -> None:
        self.answers: dict[str, Capture] = {}
        self.reports: dict[str, dict[tuple[Source, str], Feedback]] = {}
        self.forgotten: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._bucket = bucket
        self._read: dict[str, str] = {}
        self._unread: dict[str, tuple[str, type[Capture] | type[Feedback]]] = {}
        """Listed segments that no poll could read yet."""

    def poll(self) -> int:
        """Reads new segments, and returns how many rows were new. Raises `RetryError`."""
        self.poll_forgotten()
        return self._poll(keys.LIVE_CAPTURES, Capture) + self._poll(keys.LIVE_FEEDBACK, Feedback)

    @property
    def alarm(self) -> str:
        """Which segments cannot be read; empty if all could."""
        if not self._unread:
            return ""
        return f"{len(self._unread)} segments of users cannot be read: {min(self._unread)}"

    def poll_forgotten(self) -> frozenset[str]:
        """Drops the rows of users who were forgotten, and returns those that are new. Raises
        `RetryError`.

        Listed twice: a learner stores data of those that one short listing left out.
        """
        gone = (forgotten_users(self._bucket) | forgotten_users(self._bucket)) - self.forgotten
        if gone:
            self.forgotten |= gone
            self._drop(gone)
        return gone

    def _poll(self, prefix: str, kind: type[Capture] | type[Feedback]) -> int:
        found = sum(
            self._read_segment(key, *self._unread[key])
            for key in list(self._unread)
            if key.startswith(prefix)
        )
        for gateway in self._bucket.list_prefixes(prefix):
            place = f"{prefix}{gateway}/"
            for key in self._bucket.list(place, after=self._read.get(place)):
                found += self._read_segment(key, gateway, kind)
                self._read[place] = key
        return found

    def _read_segment(self, key: str, gateway: str, kind: type[Capture] | type[Feedback]) -> int:
        """Reads a listed segment. One that cannot be read, or is not found, is read again by the
        next polls: without it, answers would never be learned from."""
        number = keys.trailing_number(key)
        if number is None:
            return 0
        try:
            data = self._bucket.get(key, limit=MAX_SEGMENT_BYTES)
            if data is None:
                if key in self._unread and not self._bucket.is_listed(key):
                    self._unread.pop(key)
                else:
                    self._unread[key] = gateway, kind
                return 0
            rows = decode_segment(
                data, kind, gateway=gateway, number=number, run=self._bucket.url, key=key
            )
        except CorruptError:
            # Nothing is deleted or consumed for it: it waits, and is the alarm.
            self._unread[key] = gateway, kind
            return 0
        self._unread.pop(key, None)
        return sum(self._add(row) for row in rows)

    def _add(self, row: Capture | Feedback) -> bool:
        if row.user in self.forgotten and row.user:
            return False
        if isinstance(row, Capture):
            if row.answer in self.answers or (row.judged_only and not self.judges):
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
