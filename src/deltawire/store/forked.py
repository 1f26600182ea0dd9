"""A fork's bucket: reads payloads that are not there from the run above it.

A fork of a run lies below it, at ``RUN/forks/NAME``, so its place names its parent, and no object
of a bucket does. A line of a fork, ``RUN/forks/NAME/lines/LINE``, reads from ``RUN/lines/LINE``.
Only reads of immutable objects go to the parent: blobs, whose names are the
hashes of their bytes, and parts of the trainer's states, whose hashes the fork's own commits state.
Listings, sizes and writes are those of the fork, so that a writer stores again what only the parent
has, and the fork depends on its parent for what it began with and for nothing that it made.

Most of a manifest is its piece table, which does not compress. The versions that a fork began with
name their tables as blobs (codec ``dw1-fork``), and the parent has those tables in its manifests of
the same versions. So a blob that is a table is taken from there, and compared with its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from deltawire.errors import CorruptError, InputError
from deltawire.store.bucket import Bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.store.parallel import in_parallel

FORKS: Final = "forks/"
"""The keys below a run that belong to its forks."""

TABLE_ABOVE: Final = "dw1-fork"
"""The codec of payloads whose table the run above may have in a manifest."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
_FORK = re.compile(rf"\A(.+)/forks/({_NAME})(/lines/{_NAME})?/?\Z", re.DOTALL)
_SHARED = re.compile(r"weights/blobs/[0-9a-f]{64}|checkpoints/[0-9]{10}/state-[0-9]{10}\.bin")
_BLOBS = "weights/blobs/"
_MANIFESTS = "weights/manifests/"
_MANIFEST = re.compile(rf"{_MANIFESTS}([0-9]{{10}})\.json")
_MANIFEST_BYTES = 2 << 20
_FORK_RECORD = "deltawire.fork"
"""The member of the first manifest's metadata that states where the fork began."""
_AT_ONCE = 16
"""Manifests of a fork that are read at once."""


class _StatedTable(msgspec.Struct):
    inline: Annotated[bytes, msgspec.Meta(max_length=12 << 10)] = b""
    blob: str = ""


class _StatedPayload(msgspec.Struct):
    table: _StatedTable
    codec: str = ""


class _ForkedAt(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Stated(msgspec.Struct):
    """The payloads that a manifest, or an anchor that was made later, states."""

    delta: _StatedPayload | None = None
    anchor: _StatedPayload | None = None
    payload: _StatedPayload | None = None
    metadata: dict[str, msgspec.Raw] = {}

    @property
    def forked_at(self) -> str:
        """The version that a fork began with, as ten digits; empty where none is stated."""
        with suppress(KeyError, msgspec.DecodeError):
            record = msgspec.json.decode(self.metadata[_FORK_RECORD], type=_ForkedAt)
            return f"{record.version:010d}"
        return ""

    @property
    def payloads(self) -> list[_StatedPayload]:
        return [one for one in (self.delta, self.anchor, self.payload) if one is not None]


def _stated(bucket: Bucket, key: str) -> _Stated | None:
    """Returns what an object states of its payloads; None if it is missing or damaged. The names of
    tables are compared with their bytes, so nothing else of the object is checked."""
    with suppress(CorruptError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = bucket.get(key, limit=_MANIFEST_BYTES)
        return None if data is None else msgspec.json.decode(data, type=_Stated)
    return None


def split_fork(url: str) -> tuple[str, str]:
    """Returns the URL of the run that a fork belongs to, and the fork's name, from a fork's URL;
    from that of a line of a fork, the URL of the run's line. An empty name for any other URL."""
    found = _FORK.match(url)
    return (url, "") if found is None else (found[1] + (found[3] or ""), found[2])


class ForkedBucket(DelegatingBucket):
    """The bucket of a fork; ``open_upper`` opens that of its parent, once it is needed.

    Example::

        ForkedBucket(bucket, lambda: open_bucket("s3://bucket/run")).get(key, limit=100)
    """

    def __init__(self, inner: Bucket, open_upper: Callable[[], Bucket]) -> None:
        super().__init__(inner)
        self._open_upper = open_upper
        self._upper: Bucket | None = None
        self._versions: dict[str, str] | None = None
        """The version, as ten digits, that names each table of the run above."""
        self._again = False
        self._last = ("", b"")
        """The table that was read last: readers of a part ask for several ranges of one."""

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        found = self.inner.get(key, limit=limit)
        if found is not None or (upper := self._above(key)) is None:
            return found
        if (table := self._table(key, upper)) is None:
            found = upper.get(key, limit=limit)
            table = self._table(key, upper, again=True) if found is None else None
        if table is not None and len(table) > limit:
            raise self._too_long(key, f"has {len(table)} bytes; at most {limit} are read")
        return found if table is None else table

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`."""
        found = self.inner.read_ranges(key, ranges)
        if found is not None or (upper := self._above(key)) is None:
            return found
        if (table := self._table(key, upper)) is None:
            found = upper.read_ranges(key, ranges)
            table = self._table(key, upper, again=True) if found is None else None
        if table is None:
            return found
        if any(start + length > len(table) for start, length in ranges):
            raise self._too_long(key, f"ends after {len(table)} bytes")
        return [memoryview(table)[start : start + length] for start, length in ranges]

    def reconnect(self) -> None:
        """As `Bucket.reconnect`."""
        self.inner.reconnect()
        if self._upper is not None:
            self._upper.reconnect()

    def _too_long(self, key: str, what: str) -> CorruptError:
        return CorruptError(f"a piece table of the run above {what}", run=self.url, key=key)

    def _above(self, key: str) -> Bucket | None:
        """Returns the parent's bucket for a key that it may have; None without a parent."""
        if not _SHARED.fullmatch(key):
            return None
        if self._upper is None:
            try:
                self._upper = self._open_upper()
            except InputError:
                return None  # The folder above is no bucket: the object is missing.
        return self._upper

    def _table(self, key: str, upper: Bucket, *, again: bool = False) -> bytes | None:
        """Returns the bytes of a blob that the parent has as the table in a manifest, or in an
        anchor that was made later; None if it has none. ``again`` looks once more which blobs are
        tables, where an answer about that may have been damaged."""
        name = key.removeprefix(_BLOBS)
        last = self._last  # Another thread may replace it.
        if last[0] == name:
            return last[1]
        if name == key:
            return None
        if self._versions is None or (again and not self._again):
            self._again = again  # Once: a damaged fork asks for many blobs.
            self._versions = dict(self._named_tables())
        if (number := self._versions.get(name)) is None:
            return None
        for place in (f"{_MANIFESTS}{number}.json", f"weights/compacted/{number}-anchor.json"):
            stated = _stated(upper, place)
            for one in stated.payloads if stated is not None else ():
                data = one.table.inline
                if data and blake3(data).hexdigest() == name:
                    self._last = (name, data)
                    return data
        return None

    def _named_tables(self) -> Iterator[tuple[str, str]]:
        """Yields the tables that the fork's first versions name, with the versions' digits. Some
        may have theirs here: an earlier release may have begun the fork. Its own versions come
        after the one that the first manifest states. Passes over damaged manifests."""
        listed = [key for key in self.inner.list(_MANIFESTS) if _MANIFEST.fullmatch(key)]
        forked_at = ""
        for at in range(0, len(listed), _AT_ONCE):
            keys = listed[at : at + _AT_ONCE]
            read = in_parallel(self.inner, partial(_stated, self.inner), keys)
            for key, stated in zip(keys, read, strict=True):
                number = key[-15:-5]
                if forked_at and number > forked_at:
                    return
                if stated is None:
                    continue
                forked_at = forked_at or stated.forked_at
                payloads = stated.payloads
                yield from (
                    (one.table.blob, number) for one in payloads if one.codec == TABLE_ABOVE
                )
