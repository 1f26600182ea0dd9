"""Lineages as rows of compaction: a row has several users, and stays without those forgotten.

An erasure finds a user's groups by the lineages, names them in its record, deletes them, and only
then takes the user out of the lineages. Compaction therefore removes a user from a lineage only if
the erasure's record names the group and the group is no longer stored. The erasure, which may run
at the same time, has then finished with this lineage.

Only lineages of groups that a checkpoint of the trainer settled are compacted (`settled_below`): no
learner stores such a group again, no erasure takes a user out of it, and no trainer needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.live.forgotten import forgotten_users
from deltawire.rl.control.lineages import decode_lineages
from deltawire.runtime.compacted_segments import require_compacted
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, require_agreed, unreadable
from deltawire.wire import keys
from deltawire.wire.compacted import CompactedName, NumberedRow, Stream
from deltawire.wire.ledger import Ledger
from deltawire.wire.lineage import (
    MAX_FORGOTTEN_BYTES,
    MAX_LINEAGE_BYTES,
    Forgotten,
    Lineage,
    without_users,
)
from deltawire.wire.objects import decode_json, encode_json, prepared

SO = "nothing was compacted"
MAX_COMMIT_BYTES = 64 << 20
"""The limit of a checkpoint's commit."""


class LineageRows:
    """The lineages of one learner. An erasure leaves its users in those of the ``kept`` groups,
    which stay for now.

    Example::

        StreamCompactor(bucket, LineageRows(), "live", below=lambda: settled_below(bucket, "live"))
    """

    def __init__(self, *, kept: Container[tuple[str, int]] = ()) -> None:
        self.stream: Stream = "lineage"
        self._kept = kept

    def read(self, bucket: Bucket, owner: str, number: int) -> list[NumberedRow] | None:
        """Reads a lineage as `deltawire.live.compaction.stream_rows.StreamRows.read` says."""
        key = keys.live_lineage(owner, number)
        data = require_agreed(bucket, key, limit=MAX_LINEAGE_BYTES, so=SO)
        if data is None:
            return None
        row = NumberedRow(number, data)
        try:
            decode_lineages([row], owner, run=bucket.url, key=key)
        except CorruptError as error:
            raise unreadable(bucket, key, error, so=SO) from error
        return [row]

    def compacted(
        self, bucket: Bucket, place: CompactedName, *, so: str = "nothing was deleted"
    ) -> list[NumberedRow] | None:
        """Reads a compacted segment of lineages."""
        rows = require_compacted(bucket, place, so=so)
        try:
            decode_lineages(rows or (), place.owner, run=bucket.url, key=place.key)
        except CorruptError as error:
            raise unreadable(bucket, place.key, error, so=so) from error
        return rows

    def users(self, row: NumberedRow) -> Collection[str]:
        """The users of the group's answers."""
        return {one.user for one in _lineage(row).answers if one.user}

    def at(self, row: NumberedRow) -> float:
        """When the group was made."""
        return _lineage(row).at

    def distinct(self, rows: Sequence[NumberedRow]) -> list[NumberedRow]:
        """Leaves out further rows of one group: an erasure may have stored it at its key again."""
        return list({row.number: row for row in reversed(rows)}.values())[::-1]

    def without(self, rows: Sequence[NumberedRow], users: Collection[str]) -> Sequence[NumberedRow]:
        """Returns the rows without these users; their rewards stay."""
        found = [row if self._is_kept(row) else _without(row, users) for row in rows]
        return rows if all(map(_is, found, rows)) else found

    def without_forgotten(
        self, bucket: Bucket, rows: Sequence[NumberedRow]
    ) -> Sequence[NumberedRow]:
        """Leaves out users whose erasure is done with the group."""
        forgotten = forgotten_users(bucket) | forgotten_users(bucket)
        lineages = [_lineage(row) for row in rows]
        present = {one.user for lineage in lineages for one in lineage.answers} & forgotten
        named = {user: _groups_of(bucket, user) for user in sorted(present)}
        gone: dict[tuple[str, int], set[str]] = {}
        for lineage in lineages:
            place = lineage.worker, lineage.sequence
            users = {one.user for one in lineage.answers}
            mine = {user for user in users & present if place in named[user]}
            if mine and not _group_is_stored(bucket, *place):
                gone[place] = mine
        if not gone:
            return rows
        return [
            _without(row, gone.get((lineage.worker, lineage.sequence), frozenset()))
            for row, lineage in zip(rows, lineages, strict=True)
        ]

    def without_expired(
        self, bucket: Bucket, rows: Sequence[NumberedRow], before: float
    ) -> Sequence[NumberedRow]:
        """Leaves out the lineages from before a time of whose group nothing is left."""
        old = [one for one in map(_lineage, rows) if one.at < before]
        stored: set[str] = set()
        for worker in sorted({one.worker for one in old}):
            for prefix in _prefixes(worker):
                stored.update(listed_twice(bucket, prefix))
        dropped = {
            one.sequence
            for one in old
            if stored.isdisjoint(_keys_of_group(one.worker, one.sequence))
        }
        return [row for row in rows if row.number not in dropped]

    def _is_kept(self, row: NumberedRow) -> bool:
        lineage = _lineage(row)
        return (lineage.worker, lineage.sequence) in self._kept


def settled_below(bucket: Bucket, worker: str) -> int:
    """Returns the number below which the newest checkpoint says that all groups of a worker are
    settled; 0 without one. Raises `UnreadableError` and `RetryError`."""
    versions = [keys.trailing_number(name) for name in bucket.list_prefixes(keys.CHECKPOINTS)]
    for version in sorted((one for one in versions if one is not None), reverse=True):
        key = keys.checkpoint_commit(version)
        data = require_agreed(bucket, key, limit=MAX_COMMIT_BYTES, so=SO)
        if data is not None:
            try:
                commit = decode_json(data, _Commit, run=bucket.url, key=key)
            except CorruptError as error:
                raise unreadable(bucket, key, error, so=SO) from error
            return commit.ledger.below.get(worker, 0)
    return 0


class _Commit(msgspec.Struct):
    """The members of a checkpoint's commit that compaction needs."""

    version: Annotated[int, Meta(ge=0)]
    ledger: Ledger


def _lineage(row: NumberedRow) -> Lineage:
    return msgspec.json.decode(row.data, type=prepared(Lineage))


def _without(row: NumberedRow, users: Collection[str]) -> NumberedRow:
    lineage = _lineage(row)
    if not any(one.user and one.user in users for one in lineage.answers):
        return row
    return NumberedRow(row.number, encode_json(without_users(lineage, frozenset(users))))


def _is(one: object, other: object) -> bool:
    return one is other


def _groups_of(bucket: Bucket, user: str) -> frozenset[tuple[str, int]]:
    """Returns the groups that the record of a user's erasure names."""
    key = keys.live_forgotten(user)
    data = require_agreed(bucket, key, limit=MAX_FORGOTTEN_BYTES, so=SO)
    if data is None:
        return frozenset()
    try:
        return frozenset(decode_json(data, Forgotten, run=bucket.url, key=key).groups)
    except CorruptError as error:
        raise unreadable(bucket, key, error, so=SO) from error


def _keys_of_group(worker: str, sequence: int) -> Iterable[str]:
    yield keys.rollout(worker, sequence)
    yield keys.reference(worker, sequence)
    yield keys.proof_salt(worker, sequence)


def _prefixes(worker: str) -> Iterable[str]:
    yield keys.rollouts_of(worker)
    yield keys.references_of(worker)
    yield keys.proof_salts_of(worker)


def _group_is_stored(bucket: Bucket, worker: str, sequence: int) -> bool:
    """Returns whether anything of a group is listed, by two listings."""
    return any(bucket.is_listed(key) for _ in range(2) for key in _keys_of_group(worker, sequence))
