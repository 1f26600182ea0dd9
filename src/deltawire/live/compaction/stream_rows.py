"""Rows of the streams that are compacted: whose they are, when, and without whom."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from deltawire.errors import CorruptError
from deltawire.live.forgotten import forgotten_users
from deltawire.runtime.compacted_segments import require_compacted
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import require_agreed, unreadable
from deltawire.wire import keys
from deltawire.wire.captures import MAX_SEGMENT_BYTES, Capture, Feedback, decode_rows, raw_rows
from deltawire.wire.compacted import CompactedName, NumberedRow, Stream
from deltawire.wire.objects import prepared

SO = "nothing was compacted"


class StreamRows(Protocol):
    """The facts of a stream's rows that compaction needs."""

    stream: Stream

    def read(self, bucket: Bucket, owner: str, number: int) -> list[NumberedRow] | None:
        """Reads a segment that two answers agree on; None if it is gone. Raises
        `UnreadableError`."""

    def compacted(
        self, bucket: Bucket, place: CompactedName, *, so: str = "nothing was deleted"
    ) -> list[NumberedRow] | None:
        """Reads a compacted segment whose rows state users and times; None if it is gone. Raises
        `UnreadableError`."""

    def users(self, row: NumberedRow) -> Collection[str]:
        """The pseudonyms in a row."""

    def at(self, row: NumberedRow) -> float:
        """When the answer of a row was served, or a group made; in seconds since 1970."""

    def distinct(self, rows: Sequence[NumberedRow]) -> list[NumberedRow]:
        """Returns the rows without those that another one repeats."""

    def without(self, rows: Sequence[NumberedRow], users: Collection[str]) -> Sequence[NumberedRow]:
        """Returns the rows without these users; the same rows if they hold none of them."""

    def without_forgotten(
        self, bucket: Bucket, rows: Sequence[NumberedRow]
    ) -> Sequence[NumberedRow]:
        """Returns the rows without users whose erasure has taken them out of these rows, or will
        not look for them there any more. Raises `RetryError` and `UnreadableError`."""

    def without_expired(
        self, bucket: Bucket, rows: Sequence[NumberedRow], before: float
    ) -> Sequence[NumberedRow]:
        """Returns the rows without those from before a time that nothing needs any more. Raises
        `RetryError`."""


class _Facts(msgspec.Struct):
    user: str = ""
    at: float = 0.0
    served_at: float | None = None


class ServedRows:
    """Captures and feedback: a row is one user's, and is left out with the user."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._kind: type[Capture | Feedback] = Capture if stream == "captures" else Feedback

    def read(self, bucket: Bucket, owner: str, number: int) -> list[NumberedRow] | None:
        """Reads a segment as `StreamRows.read` says."""
        key = f"{keys.live_segments(self.stream, owner)}{number:010d}"
        data = require_agreed(bucket, key, limit=MAX_SEGMENT_BYTES, so=SO)
        if data is None:
            return None
        try:
            rows = raw_rows(data, gateway=owner, number=number, run=bucket.url, key=key)
            # One row that nobody can read would make a compacted segment unreadable.
            decode_rows(rows, self._kind, run=bucket.url, key=key)
            found = [NumberedRow(number, bytes(row)) for row in rows]
            self._check(found, bucket, key)
        except CorruptError as error:
            raise unreadable(bucket, key, error, so=SO) from error
        return found

    def compacted(
        self, bucket: Bucket, place: CompactedName, *, so: str = "nothing was deleted"
    ) -> list[NumberedRow] | None:
        """Reads a compacted segment as `StreamRows.compacted` says."""
        rows = require_compacted(bucket, place, so=so)
        try:
            self._check(rows or (), bucket, place.key)
        except CorruptError as error:
            raise unreadable(bucket, place.key, error, so=so) from error
        return rows

    def _check(self, rows: Sequence[NumberedRow], bucket: Bucket, key: str) -> None:
        """Raises `CorruptError` for a row that states no user or no time."""
        try:
            times = [self.at(row) for row in rows]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptError(f"a row cannot be read: {error}", run=bucket.url, key=key) from error
        if not all(map(math.isfinite, times)):
            raise CorruptError("a row states no time", run=bucket.url, key=key)

    def users(self, row: NumberedRow) -> Collection[str]:
        """The row's user, if it has one."""
        user = self._facts(row).user
        return (user,) if user else ()

    def at(self, row: NumberedRow) -> float:
        """When the answer was served."""
        facts = self._facts(row)
        return facts.at if facts.served_at is None else facts.served_at

    def distinct(self, rows: Sequence[NumberedRow]) -> list[NumberedRow]:
        """Leaves out equal bytes."""
        return list({row.data: row for row in reversed(rows)}.values())[::-1]

    def without(self, rows: Sequence[NumberedRow], users: Collection[str]) -> Sequence[NumberedRow]:
        """Leaves out the rows of these users."""
        kept = [row for row in rows if self._facts(row).user not in users]
        return rows if len(kept) == len(rows) else kept

    def without_forgotten(
        self, bucket: Bucket, rows: Sequence[NumberedRow]
    ) -> Sequence[NumberedRow]:
        """Leaves out the rows of forgotten users. They are listed twice, so that one incomplete
        listing cannot keep a user."""
        return self.without(rows, forgotten_users(bucket) | forgotten_users(bucket))

    def without_expired(
        self, bucket: Bucket, rows: Sequence[NumberedRow], before: float
    ) -> Sequence[NumberedRow]:
        """Leaves out the rows from before a time."""
        del bucket
        return [row for row in rows if self.at(row) >= before]

    def _facts(self, row: NumberedRow) -> _Facts:
        return msgspec.msgpack.decode(row.data, type=prepared(_Facts))
