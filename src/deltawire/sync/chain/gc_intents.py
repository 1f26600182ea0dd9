"""Deletion intents: keep retention from deleting a blob that a committed version counts on.

Who waits for whom::

    retention                                   writer
      1. announces which blobs it will delete     1. puts blobs
         (creates the intent)                     2. commits: creates the manifest
      2. reads manifests and compacted deltas     3. reads the intents that name its blobs, and
         again                                       waits until they are gone or expired
      3. deletes what nothing refers to           4. checks its blobs, puts what is missing
      4. deletes the intent

Both announce what they are about to do before they read what the other does. So of an intent and a
commit one must see the other, however long either is stalled and wherever:

- If the read (2) of retention begins after the commit, it sees the manifest, and keeps its blobs.
- Otherwise the intent was there before the commit. The writer then finds it, and waits; or it is
  gone again, because every deletion is done. Either way the writer checks its blobs after the last
  deletion, and what it puts again is named by a manifest that is there: later intents leave it.

Names do not help here: a blob's name states its content, so the same name may be unused now and
needed by a version a moment later. Ages alone do not help either: a writer may be stalled for
longer than any grace period, and a deleter too.

Waiting ends. Retention deletes nothing later than `INTENT_S` after it has created its intent, by
its own clock, and a deletion whose answer never came is given `MARGIN_S` to happen. An intent that
is older than both by the store's clock was left by a process that died: writers do not wait for it,
and the next retention deletes it. An object that is no intent of this run, or not signed in a
signed run, delays nobody.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial

from deltawire.errors import CorruptError, RetryError
from deltawire.store import Bucket, ObjectMeta, RetryingBucket, RetryPolicy
from deltawire.sync.chain.objects import check_signed
from deltawire.wire import keys
from deltawire.wire.coordination import (
    MAX_INTENT_BLOBS,
    MAX_INTENT_BYTES,
    DeletionIntent,
    decode_intent,
)
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

INTENT_S = 600.0
"""How long after it was created an intent may still delete."""

MARGIN_S = 300.0
"""How long a deletion that was not answered may take to happen."""


def store_clock(bucket: Bucket) -> datetime:
    """Reads the store's clock: the age of an object written for the purpose."""
    bucket.put(keys.CLOCK, b"\n")
    entry = bucket.head(keys.CLOCK)
    if entry is None:
        raise CorruptError("an object just written is missing", run=bucket.url, key=keys.CLOCK)
    return entry.modified


def delete_blobs(
    bucket: Bucket,
    run: Run,
    doomed: Iterable[str],
    referred: Callable[[], set[str]],
    *,
    signer: Signer | None = None,
) -> Iterator[str]:
    """Deletes those blobs of ``doomed``, keys, that are not among ``referred()``, which is called
    after each intent was created and must read the bucket again each time.

    Yields each key before it is deleted; the caller need not continue. Raises `RetryError` if the
    store does not answer: the intent then stays, because a deletion may still be under way.
    """
    left = list(doomed)
    while left:
        batch, left = left[:MAX_INTENT_BLOBS], left[MAX_INTENT_BLOBS:]
        until = _uptime() + INTENT_S
        key = keys.deletion_intent(secrets.token_hex(16))
        names = [name.removeprefix(keys.BLOBS) for name in batch]
        intent = DeletionIntent(run=run.id, blobs=names)
        bucket.put(key, seal(intent, key=key, signer=signer))
        wanted = referred()
        inner = bucket.inner if isinstance(bucket, RetryingBucket) else bucket
        for name in batch:
            if name in wanted:
                continue
            if _uptime() > until:
                left = []  # The next retention finds them again.
                break
            yield name
            RetryPolicy().run(partial(_delete_before, until, inner, name))
        bucket.delete(key)


def _delete_before(until: float, bucket: Bucket, key: str) -> None:
    """Deletes an object; repeating it is another deletion, which must not begin after ``until``."""
    if _uptime() > until:
        raise RetryError("the time for this deletion is over", run=bucket.url, key=key)
    bucket.delete(key)


def drop_dead_intents(bucket: Bucket, now: datetime) -> None:
    """Deletes the intents of processes that died. ``now`` is by the store's clock."""
    for entry in bucket.list_objects(keys.DELETION_INTENTS):
        if _is_dead(entry, now):
            bucket.delete(entry.key)


def blobs_stay(
    bucket: Bucket, run: Run, refs: Iterable[BlobRef], *, unsigned: bool = False
) -> bool:
    """Whether all of ``refs``, blobs of an object that was just committed, are there and will stay.

    Waits for the intents that were created before and name one of them; ``unsigned`` ones count too
    in a signed run where retention has no key. If the answer is no, what is missing must be put
    again; it then stays. Raises `RetryError` if the store does not answer.
    """
    bucket = RetryingBucket.over(bucket)
    sizes = {keys.blob(ref.hash): ref.bytes for ref in refs}
    if not sizes:
        return True
    for entry in bucket.list_objects(keys.DELETION_INTENTS):
        if sizes.keys() & _named_by(bucket, run, entry, unsigned=unsigned):
            _wait_for(bucket, entry)
    return all(bucket.size(key) == size for key, size in sizes.items())


def _named_by(bucket: Bucket, run: Run, entry: ObjectMeta, *, unsigned: bool) -> set[str]:
    """Returns the keys of the blobs that an intent names, none if it is not retention's."""
    for _ in range(2):  # A damaged answer is asked for again.
        try:
            data = bucket.get(entry.key, limit=MAX_INTENT_BYTES)
            if data is None:
                return set()
            if not unsigned:
                check_signed(bucket, run, data, entry.key)
            intent = decode_intent(data, table=run, run=bucket.url, key=entry.key)
            return {keys.blob(name) for name in intent.blobs}
        except CorruptError:
            continue
    return set()


def _wait_for(bucket: Bucket, entry: ObjectMeta) -> None:
    while bucket.exists(entry.key):
        if _is_dead(entry, store_clock(bucket)):
            return
        time.sleep(bucket.poll_s)


def _uptime() -> float:
    """Returns seconds of a clock that runs while the machine sleeps, where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def _is_dead(entry: ObjectMeta, now: datetime) -> bool:
    return now - entry.modified > timedelta(seconds=INTENT_S + MARGIN_S)
