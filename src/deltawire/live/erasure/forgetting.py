"""Forgetting: deletes what was stored of a user, and tells which versions were trained on it.

The record ``live/forgotten/<user>.json`` comes first: from then on gateways store nothing more of
this user, upload nothing from their spools, and no learner reads it. Then segments, groups and
references are replaced or deleted. Running it again continues where it stopped.

Deleted here: rows of captures and feedback; groups of ``rollouts/`` that were consumed and hold an
answer of the user (whole groups: a group's bytes are hashed), and the user's part of groups that
wait for the trainer; their references; and the user in lineages (rewards stay, without the user).
Not deleted here: weights, and the trainer's checkpoints. They are functions of the data, not copies
of it; ``versions`` lists those that were trained on it, and `deltawire.live.erasure.rebuilding`
withdraws them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set

import msgspec
from blake3 import blake3

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.live.erasure.user_groups import UserGroups
from deltawire.live.forgotten import forgotten_users
from deltawire.live.learning.grouping import group_without_users
from deltawire.live.learning.records import require_lineages
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, require_agreed
from deltawire.wire import keys
from deltawire.wire.captures import (
    MAX_SEGMENT_BYTES,
    Capture,
    Feedback,
    decode_segment,
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
    bucket: Bucket, run: Run, user: str, *, learners: Mapping[str, Bucket] | None = None
) -> Forgotten:
    """Deletes everything that a run's bucket holds of the user with this pseudonym.

    ``learners`` are, in a signed run, the buckets that sign as each learner: a group and a lineage
    are valid only by the key of the learner that made them.

    Returns the record, which stays in the bucket. Raises `InputError`, before anything is changed,
    if the user is in groups of a learner that is missing, `GroupsNeededError`, after everything
    else was deleted, if a trainer that starts again would need some of the groups,
    `UnreadableError` if an object cannot be read that may hold the user, and `RetryError` if the
    store does not answer; the same call then continues.
    """
    key = keys.live_forgotten(user)
    before = _known(bucket, key)
    mine = _lineages_of(bucket, user)
    writers = _writers(bucket, mine, learners)
    record = before or Forgotten(run=run.id, user=user, at=time.time())
    if before is None:
        bucket.put(key, encode_json(record))
        # A learner that had not seen the record may have stored a group meanwhile.
        mine = _lineages_of(bucket, user)
        writers = _writers(bucket, mine, learners)
    places = {(one.worker, one.sequence) for one in mine}
    emptied = set(record.groups) - places
    record = msgspec.structs.replace(record, groups=sorted({*record.groups, *places}))
    used = UserGroups(bucket, run, record.groups)
    # Stored before anything is deleted: a run that stops in between forgets no version.
    record = _name_versions(bucket, record, used, emptied=emptied)
    answers, feedback = _delete_rows(bucket, user)
    record = msgspec.structs.replace(
        record, answers=record.answers + answers, feedback=record.feedback + feedback
    )
    # Versions that were committed meanwhile may have consumed a group that waited.
    record = _name_versions(bucket, record, used, emptied=emptied)
    needed = used.needed_by_a_trainer()
    _delete_groups(bucket, user, mine, writers, used, kept=needed)
    if needed & places:
        raise GroupsNeededError(
            "groups of the user stay, because a trainer that starts again computes the steps after "
            "its newest checkpoint from them; everything else is deleted",
            record=record,
            hint="run the same command after the trainer's next checkpoint; if no trainer will go "
            "on with this run, delete its checkpoints first",
            run=bucket.url,
        )
    return record


def _lineages_of(bucket: Bucket, user: str) -> list[Lineage]:
    return [one for one in require_lineages(bucket) if any(a.user == user for a in one.answers)]


def _name_versions(
    bucket: Bucket, record: Forgotten, used: UserGroups, *, emptied: Set[tuple[str, int]]
) -> Forgotten:
    """Stores the record with the versions that were trained on its groups so far.

    One that was ``emptied`` before counts only if the version states other bytes than those that
    are stored now: then the trainer had read the group before.
    """
    used.update()
    versions = set(record.versions)
    for group, version, stated in used.trained:
        if group not in emptied or stated != _hash_of(bucket, *group):
            versions.add(version)
    record = msgspec.structs.replace(record, versions=sorted(versions))
    bucket.put(keys.live_forgotten(record.user), encode_json(record))
    return record


def _writers(
    bucket: Bucket, lineages: Iterable[Lineage], learners: Mapping[str, Bucket] | None
) -> dict[str, Bucket]:
    """Returns the bucket that may replace the objects of each learner in ``lineages``."""
    names = sorted({one.worker for one in lineages})
    if learners is None:
        return dict.fromkeys(names, bucket)
    if missing := [name for name in names if name not in learners]:
        raise InputError(
            "the user's answers are in signed groups, which need the keys of the learners that "
            f"made them: {', '.join(missing)}",
            hint="give NAME=FILE for each with --learner-key",
            run=bucket.url,
        )
    return {name: learners[name] for name in names}


def _known(bucket: Bucket, key: str) -> Forgotten | None:
    data = require_agreed(bucket, key, limit=MAX_FORGOTTEN_BYTES)
    return None if data is None else decode_json(data, Forgotten, run=bucket.url, key=key)


def _delete_groups(
    bucket: Bucket,
    user: str,
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
    while (others := _erased_by_others(bucket, user, mine)) != done:
        for lineage in mine:
            place = (lineage.worker, lineage.sequence)
            if place in kept:
                continue
            gone = {user} | others.get(place, set())
            writer = writers[lineage.worker]
            bucket.delete(keys.reference(*place))
            if place in used.settled:
                bucket.delete(keys.rollout(*place))
            else:
                _empty(writer, lineage, gone)
            writer.put(keys.live_lineage(*place), encode_json(without_users(lineage, gone)))
        done = others


_Erased = dict[tuple[str, int], set[str]]


def _erased_by_others(bucket: Bucket, user: str, mine: Iterable[Lineage]) -> _Erased:
    """Returns, by group, its other users whose records of an erasure name it."""
    found: _Erased = {}
    others = {answer.user for lineage in mine for answer in lineage.answers} - {user}
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


def _hash_of(bucket: Bucket, worker: str, sequence: int) -> str:
    """Returns the digits by which manifests name a stored group; "-" if it is gone."""
    data = require_agreed(bucket, keys.rollout(worker, sequence), limit=MAX_GROUP_BYTES)
    return "-" if data is None else blake3(data).hexdigest()[:GROUP_HASH_DIGITS]


def _delete_rows(bucket: Bucket, user: str) -> tuple[int, int]:
    """Deletes the user's rows; returns how many answers and how much feedback that were.

    Another erasure may run at the same time, and the last of two that replace a segment decides
    what it holds. So both delete the rows of all users who were forgotten, until there is no new
    one: whichever wrote last sees the other's record.
    """
    answers = feedback = 0
    done = frozenset[str]()
    while not (users := _forgotten(bucket) | {user}) <= done:
        answers += _filter(bucket, keys.LIVE_CAPTURES, Capture, users, user)
        feedback += _filter(bucket, keys.LIVE_FEEDBACK, Feedback, users, user)
        done = users
    return answers, feedback


def _forgotten(bucket: Bucket) -> frozenset[str]:
    """Returns the users of whom a record of an erasure exists, by two listings."""
    return forgotten_users(bucket) | forgotten_users(bucket)


def _filter(
    bucket: Bucket, prefix: str, kind: type[Capture] | type[Feedback], users: Set[str], user: str
) -> int:
    """Replaces the segments that hold rows of ``users``; returns how many rows were ``user``'s."""
    deleted = 0
    for key in listed_twice(bucket, prefix):
        gateway, _, _ = key.removeprefix(prefix).partition("/")
        number = keys.trailing_number(key)
        if number is None:
            continue
        data = require_agreed(bucket, key, limit=MAX_SEGMENT_BYTES)
        if data is None:
            continue
        try:
            rows = decode_segment(
                data, kind, gateway=gateway, number=number, run=bucket.url, key=key
            )
        except CorruptError as error:
            raise RetryError(
                f"a segment cannot be read, so it may hold the user's data: {error.message}",
                hint="delete the object if it is not the gateway's, then run the command again",
                run=bucket.url,
                key=key,
            ) from error
        kept = [row for row in rows if row.user not in users]
        if len(kept) < len(rows):
            bucket.put(key, encode_segment(gateway, number, [encode_row(row) for row in kept]))
            deleted += sum(row.user == user for row in rows)
    return deleted
