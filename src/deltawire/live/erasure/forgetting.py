"""Forgetting: deletes what was stored of a user, and tells which versions were trained on it.

The record ``live/forgotten/<user>.json`` comes first: from then on gateways store nothing more of
this user, upload nothing from their spools, and no learner reads it. Then segments, groups and
references are replaced or deleted. Running it again continues where it stopped.

Deleted here: rows of captures and feedback; groups of ``rollouts/`` that were consumed and hold an
answer of the user (whole groups: a group's bytes are hashed), and the user's part of groups that
wait for the trainer; their references, and the random bytes in the commitments of `deltawire prove`
to them; and the user in lineages (rewards stay, without the user).
Not deleted here: weights, and the trainer's checkpoints. They are functions of the data, not copies
of it; ``versions`` lists those that were trained on it, and `deltawire.live.erasure.rebuilding`
withdraws them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import msgspec
from blake3 import blake3

from deltawire.errors import InputError, RetryError
from deltawire.live.compaction.erasing import (
    announcing_owners,
    delete_orphaned_indexes,
    erase_compacted,
    erase_owner,
)
from deltawire.live.compaction.lineage_rows import LineageRows
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.live.erasure.stored_rows import require_rows
from deltawire.live.erasure.user_groups import Place, UserGroups
from deltawire.live.forgotten import forgotten_users
from deltawire.live.learning.grouping import group_without_users
from deltawire.rl.control.lineages import require_lineages
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, require_agreed
from deltawire.wire import keys
from deltawire.wire.captures import (
    Capture,
    Feedback,
    encode_row,
    encode_segment,
)
from deltawire.wire.ledger import GROUP_HASH_DIGITS
from deltawire.wire.lineage import MAX_FORGOTTEN_BYTES, Forgotten, Lineage, without_users
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.rollouts import MAX_GROUP_BYTES, decode_group, encode_group
from deltawire.wire.run import Run


class GroupsNeededError(RetryError):
    """Groups of the user stay until the trainer's next checkpoint; the rest of ``record`` is
    deleted."""

    def __init__(self, message: str, *, record: Forgotten, hint: str, run: str) -> None:
        super().__init__(message, hint=hint, run=run, version=record.versions[-1])
        self.record = record


def forget_user(
    bucket: Bucket,
    run: Run,
    user: str,
    *,
    learners: Mapping[str, Bucket] | None = None,
    no_trainer: bool = False,
) -> Forgotten:
    """Deletes what `forget_pseudonyms` deletes, of a user with one pseudonym."""
    return forget_pseudonyms(bucket, run, [user], learners=learners, no_trainer=no_trainer)


def forget_pseudonyms(
    bucket: Bucket,
    run: Run,
    users: Sequence[str],
    *,
    learners: Mapping[str, Bucket] | None = None,
    no_learners: Collection[str] = (),
    no_trainer: bool = False,
) -> Forgotten:
    """Deletes everything that a run's bucket holds of a user with these pseudonyms.

    ``learners`` are, in a signed run, the buckets that sign as each learner: a group and a lineage
    are valid only by the key of the learner that made them. Workers in ``no_learners`` forged
    lineages, which would name any user in any group: all of theirs are deleted, unread. With
    ``no_trainer`` no trainer will go on with the run, so none of its groups is needed.

    Each pseudonym has a record, which stays in the bucket; returns them as one, under the first
    pseudonym. Raises `InputError`, before anything is changed, if the user is in groups of a
    learner that is missing, `GroupsNeededError`, after everything else was deleted, if a trainer
    that starts again would need some of the groups, `UnreadableError` if an object cannot be read
    that may hold the user, and `RetryError` if the store does not answer; the same call then
    continues.
    """
    before = {user: _known(bucket, keys.live_forgotten(user)) for user in users}
    mine = require_lineages(bucket, users=users, without=no_learners)
    records = [before[user] or Forgotten(run=run.id, user=user, at=time.time()) for user in users]
    writers = _writers(bucket, mine, records, learners, without=no_learners)
    for record in records:
        if before[record.user] is None:
            bucket.put(keys.live_forgotten(record.user), encode_json(record))
    if None in before.values():
        # A learner that had not seen the record may have stored a group meanwhile.
        mine = require_lineages(bucket, users=users, without=no_learners)
        writers = _writers(bucket, mine, records, learners, without=no_learners)
    places = {user: {(one.worker, one.sequence) for one in _of(mine, {user})} for user in users}
    emptied = {one.user: set(one.groups) - places[one.user] for one in records}
    records = [
        msgspec.structs.replace(one, groups=sorted({*one.groups, *places[one.user]}))
        for one in records
    ]
    used = UserGroups(bucket, run, [group for one in records for group in one.groups])
    # Stored before anything is deleted: a run that stops in between forgets no version.
    records = _name_versions(bucket, records, used, emptied=emptied)
    _delete_forged(bucket, no_learners)
    deleted = _delete_rows(bucket, users)
    records = [
        msgspec.structs.replace(
            one,
            answers=one.answers + deleted[Capture][one.user],
            feedback=one.feedback + deleted[Feedback][one.user],
        )
        for one in records
    ]
    # Versions that were committed meanwhile may have consumed a group that waited.
    records = _name_versions(bucket, records, used, emptied=emptied)
    needed = set[Place]() if no_trainer else used.needed_by_a_trainer()
    _delete_groups(bucket, set(users), mine, writers, used, kept=needed)
    # To delete them needs no signature: the key of a learner that has ended may be gone.
    delete_orphaned_indexes(bucket, LineageRows(), set(users), without={*writers, *no_learners})
    record = _as_one(records)
    if needed & set[Place]().union(*places.values()):
        raise GroupsNeededError(
            "groups of the user stay, because a trainer that starts again computes the steps after "
            "its newest checkpoint from them; everything else is deleted",
            record=record,
            hint="run the same command after the trainer's next checkpoint; if no trainer will go "
            "on with this run, add --no-trainer",
            run=bucket.url,
        )
    return record


def _delete_forged(bucket: Bucket, workers: Iterable[str]) -> None:
    """Deletes all lineages of these workers, unread."""
    for name in workers:
        for prefix in keys.LINEAGE_PREFIXES:
            for key in listed_twice(bucket, f"{prefix}{name}/"):
                bucket.delete(key)


def _as_one(records: Sequence[Forgotten]) -> Forgotten:
    return msgspec.structs.replace(
        records[0],
        answers=sum(one.answers for one in records),
        feedback=sum(one.feedback for one in records),
        groups=sorted({group for one in records for group in one.groups}),
        versions=sorted({version for one in records for version in one.versions}),
    )


def _of(lineages: Iterable[Lineage], users: Collection[str]) -> list[Lineage]:
    return [one for one in lineages if any(a.user in users for a in one.answers)]


def _name_versions(
    bucket: Bucket,
    records: Iterable[Forgotten],
    used: UserGroups,
    *,
    emptied: Mapping[str, Set[Place]],
) -> list[Forgotten]:
    """Stores the records with the versions that were trained on their groups so far.

    One that was ``emptied`` before counts only if the version states other bytes than those that
    are stored now: then the trainer had read the group before.
    """
    used.update()
    found = []
    for record in records:
        versions, groups = set(record.versions), set(record.groups)
        for group, version, stated in used.trained:
            if group not in groups:
                continue
            if group not in emptied[record.user] or stated != _hash_of(bucket, *group):
                versions.add(version)
        found.append(msgspec.structs.replace(record, versions=sorted(versions)))
        bucket.put(keys.live_forgotten(record.user), encode_json(found[-1]))
    return found


def _writers(
    bucket: Bucket,
    lineages: Iterable[Lineage],
    records: Sequence[Forgotten],
    learners: Mapping[str, Bucket] | None,
    *,
    without: Collection[str],
) -> dict[str, Bucket]:
    """Returns the bucket that may replace the objects of each learner in ``lineages``, and of those
    of whom an erasure or a compaction that was killed may have left an announcement."""
    named = {worker for one in records for worker, _ in one.groups}
    left = announcing_owners(bucket, "lineage", within=None if learners is None else named)
    names = sorted({one.worker for one in lineages} | left.difference(without))
    if learners is None:
        return dict.fromkeys(names, bucket)
    if missing := [name for name in names if name not in learners]:
        raise InputError(
            "the user's answers are in signed groups, which need the keys of the learners that "
            f"made them: {', '.join(missing)}",
            hint="give NAME=FILE for each with --learner-key; if NAME is no learner, it forged "
            "them: --no-learner NAME deletes all its lineages",
            run=bucket.url,
        )
    return {name: learners[name] for name in names}


def _known(bucket: Bucket, key: str) -> Forgotten | None:
    data = require_agreed(bucket, key, limit=MAX_FORGOTTEN_BYTES)
    return None if data is None else decode_json(data, Forgotten, run=bucket.url, key=key)


def _delete_groups(
    bucket: Bucket,
    users: Set[str],
    mine: list[Lineage],
    writers: Mapping[str, Bucket],
    used: UserGroups,
    *,
    kept: Set[tuple[str, int]],
) -> None:
    """Deletes the groups of these lineages, or the user's part of those that wait, and then the
    user in the lineages.

    The erasure of another user of a group may run at the same time. So both also delete what the
    other does, until there is nothing new; but not before the other's record names the group, since
    it is found by the lineage.
    """
    done: _Erased | None = None
    while (others := _erased_by_others(bucket, users, mine)) != done:
        for lineage in mine:
            place = (lineage.worker, lineage.sequence)
            if place in kept:
                continue
            gone = users | others.get(place, set())
            writer = writers[lineage.worker]
            bucket.delete(keys.reference(*place))
            bucket.delete(keys.proof_salt(*place))
            if place in used.settled:
                bucket.delete(keys.rollout(*place))
            else:
                _empty(writer, lineage, gone)
            _empty_lineage(writer, lineage, gone)
        for name, writer in writers.items():
            # After the keys: their lineages may move into compacted segments meanwhile.
            erase_owner(writer, LineageRows(kept=kept), name, users)
        done = others


_Erased = dict[tuple[str, int], set[str]]


def _erased_by_others(bucket: Bucket, users: Set[str], mine: Iterable[Lineage]) -> _Erased:
    """Returns, by group, its other users whose records of an erasure name it."""
    found: _Erased = {}
    others = {answer.user for lineage in mine for answer in lineage.answers} - users
    for other in others & _forgotten(bucket):
        record = _known(bucket, keys.live_forgotten(other))
        for place in record.groups if record is not None else ():
            found.setdefault(place, set()).add(other)
    return found


def _empty(bucket: Bucket, lineage: Lineage, users: Set[str]) -> None:
    """Takes these users out of a group that waits for the trainer."""
    key = keys.rollout(lineage.worker, lineage.sequence)
    data = require_agreed(bucket, key, limit=MAX_GROUP_BYTES)
    if data is None:
        return
    group = decode_group(data, run=bucket.url, key=key)
    bucket.put(key, encode_group(group_without_users(group, lineage, users)))


def _empty_lineage(bucket: Bucket, lineage: Lineage, users: Set[str]) -> None:
    """Takes these users out of a lineage at its key, unless it is in a compacted segment only."""
    key = keys.live_lineage(lineage.worker, lineage.sequence)
    if bucket.is_listed(key) or bucket.is_listed(key):
        bucket.put(key, encode_json(without_users(lineage, users)))


def _hash_of(bucket: Bucket, worker: str, sequence: int) -> str:
    """Returns the digits by which manifests name a stored group; "-" if it is gone."""
    data = require_agreed(bucket, keys.rollout(worker, sequence), limit=MAX_GROUP_BYTES)
    return "-" if data is None else blake3(data).hexdigest()[:GROUP_HASH_DIGITS]


def _delete_rows(bucket: Bucket, users: Iterable[str]) -> dict[type, Counter[str]]:
    """Deletes the rows of ``users``; returns how many of each that were, by kind of row.

    Another erasure may run at the same time, and the last of two that replace a segment decides
    what it holds. So both delete the rows of all users who were forgotten, until there is no new
    one: whichever wrote last sees the other's record.
    """
    deleted: dict[type, Counter[str]] = {Capture: Counter(), Feedback: Counter()}
    done = frozenset[str]()
    while not (gone := _forgotten(bucket).union(users)) <= done:
        # Segments first: their rows may move into compacted ones meanwhile.
        deleted[Capture] += _filter(bucket, keys.LIVE_CAPTURES, Capture, gone)
        deleted[Feedback] += _filter(bucket, keys.LIVE_FEEDBACK, Feedback, gone)
        deleted[Capture] += erase_compacted(bucket, ServedRows("captures"), gone)
        deleted[Feedback] += erase_compacted(bucket, ServedRows("feedback"), gone)
        done = gone
    return deleted


def _forgotten(bucket: Bucket) -> frozenset[str]:
    """Returns the users of whom a record of an erasure exists, by two listings."""
    return forgotten_users(bucket) | forgotten_users(bucket)


def _filter(
    bucket: Bucket, prefix: str, kind: type[Capture] | type[Feedback], users: Set[str]
) -> Counter[str]:
    """Replaces the segments that hold rows of ``users``; returns how many rows each had."""
    deleted = Counter[str]()
    for key, gateway, number, rows in require_rows(bucket, prefix, kind):
        kept = [row for row in rows if row.user not in users]
        if len(kept) < len(rows):
            data = encode_segment(gateway, number, [encode_row(row) for row in kept])
            bucket.put(key, data)
            deleted.update(row.user for row in rows if row.user in users)
    return deleted
