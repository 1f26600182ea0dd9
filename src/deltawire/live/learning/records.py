"""Records: reads the answers and the feedback that gateways stored, each segment once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from deltawire.errors import CorruptError
from deltawire.live.forgotten import forgotten_users
from deltawire.live.learning.owners import has_gap
from deltawire.runtime.compacted_segments import compacted_owners, newer_than, read_compacted
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import (
    MAX_SEGMENT_BYTES,
    Capture,
    Feedback,
    Source,
    decode_rows,
    decode_segment,
)
from deltawire.wire.compacted import CompactedName, Stream

COMPACTED_EVERY = 16
"""Every so many polls look for gateways whose segments were all compacted."""


class LiveRecords:
    """Answers by id, and the reports about each by their id.

    Segments that were compacted are read in their larger objects.
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
        """Listed segments that no poll could read yet, compacted ones too."""
        self._compacted: dict[tuple[str, str], set[str]] = {}
        """The names of the compacted segments that were read, by stream and gateway."""
        self._polls = 0

    def poll(self) -> int:
        """Reads new segments, and returns how many rows were new. Raises `RetryError`."""
        self.poll_forgotten()
        found = self._poll("captures", Capture) + self._poll("feedback", Feedback)
        self._polls += 1
        return found

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

    def _poll(self, stream: Stream, kind: type[Capture] | type[Feedback]) -> int:
        prefix = f"{keys.LIVE}{stream}/"
        found = sum(
            self._read_again(key, *self._unread[key])
            for key in list(self._unread)
            if key.startswith((prefix, f"{keys.LIVE_COMPACTED}{stream}/"))
        )
        gateways = set(filter(keys.valid_name, self._bucket.list_prefixes(prefix)))
        every = self._polls % COMPACTED_EVERY == 0
        if every:  # All segments of a gateway that has stopped may be compacted.
            gateways.update(compacted_owners(self._bucket, stream))
        for gateway in sorted(gateways):
            place = f"{prefix}{gateway}/"
            last = self._read.get(place)
            # A foreign object would hide all numbers that sort before it.
            names = self._bucket.list(place, after=last)
            listed = [key for key in names if keys.owner_and_number(key, prefix) is not None]
            if every or has_gap(listed, last):
                found += self._read_compacted(stream, gateway, kind, last)
            for key in listed:
                found += self._read_segment(key, gateway, kind)
                self._read[place] = key
        return found

    def _read_compacted(
        self,
        stream: Stream,
        gateway: str,
        kind: type[Capture] | type[Feedback],
        last: str | None,
    ) -> int:
        """Reads the compacted segments with rows of segments after ``last`` that were not read."""
        number = None if last is None else keys.trailing_number(last)
        names = newer_than(self._bucket, stream, gateway, number)
        return sum(
            self._read_one_compacted(name, gateway, kind)
            for name in names
            if name.name not in self._compacted.setdefault(name[:2], set())
        )

    def _wanted(self, name: CompactedName) -> bool:
        """Returns whether a compacted segment has rows that are looked for, by its index."""
        del name
        return True

    def _read_one_compacted(
        self, name: CompactedName, gateway: str, kind: type[Capture] | type[Feedback]
    ) -> int:
        """Reads a compacted segment; one that cannot be read is read again by the next polls, and
        one that is gone is in a larger one, which is read in its place."""
        try:
            rows = read_compacted(self._bucket, name) if self._wanted(name) else []
            encoded = [row.data for row in rows or ()]
            decoded = decode_rows(encoded, kind, run=self._bucket.url, key=name.key)
        except CorruptError:
            # Nothing is deleted or consumed for it: it waits, and is the alarm.
            self._unread[name.key] = gateway, kind
            return 0
        if rows is None:
            self._unread[name.key] = gateway, kind
            return 0
        self._unread.pop(name.key, None)
        self._compacted.setdefault(name[:2], set()).add(name.name)
        found = 0
        for numbered, row in zip(rows, decoded, strict=True):
            self._at(gateway, numbered.number)
            found += self._add(row)
        return found

    def _at(self, gateway: str, number: int) -> None:
        """Says which segment the next rows come from."""

    def _read_again(self, key: str, gateway: str, kind: type[Capture] | type[Feedback]) -> int:
        """Reads what the last polls could not read: it may have been compacted meanwhile."""
        stream: Stream = "captures" if kind is Capture else "feedback"
        name = CompactedName.of(stream, gateway, key)
        if name is None:
            found = self._read_segment(key, gateway, kind)
        else:
            found = self._read_one_compacted(name, gateway, kind)
        if key not in self._unread or self._bucket.is_listed(key):
            return found
        # Gone: its rows are in a compacted segment, which was stored before it was deleted.
        number = keys.trailing_number(key) if name is None else name.span[0]
        before = f"{keys.LIVE}{stream}/{gateway}/{number - 1:010d}" if number else None
        found += self._read_compacted(stream, gateway, kind, before)
        self._unread.pop(key, None)
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
        self._at(gateway, number)
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
