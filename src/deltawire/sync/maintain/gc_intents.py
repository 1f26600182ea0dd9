"""Between writers and retention: no blob goes that a committed version counts on.

Who waits for whom::

    retention                                   writer
      1. says which blobs it will delete          1. puts blobs
         (creates the sweep)                      2. commits: creates the manifest
      2. looks at manifests and folds again       3. looks for sweeps that name its blobs, and
      3. deletes what nothing refers to             waits until they are gone or out of time
      4. takes the sweep away                     4. looks for its blobs, puts what is missing

Both say what they are about to do before they look at what the other does. So of a sweep and a
commit one must see the other, however long either is stalled and wherever:

- If the look (2) of retention begins after the commit, it sees the manifest, and leaves its blobs.
- Else the sweep was there before the commit was. The writer then finds it, and waits; or it is
  gone again, because every deletion is done. Either way the writer's look for its blobs comes
  after the last deletion, and what it puts again is named by a manifest that is there: sweeps that
  begin later leave it.

Names are no help here: a blob's name says its content, so that the same name may be nobody's now
and a version's a moment later. Ages alone are no help either: a writer may be stalled for longer
than any grace, and a deleter too.

Waiting ends. Retention deletes nothing later than `SWEEP_S` after it has made its sweep, by its own
clock, and a deletion whose answer never came is given `MARGIN_S` to happen. A sweep that is older
than both by the store's clock was left by a process that died: writers do not wait for it, and the
next retention takes it away.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial

from deltawire.errors import CorruptError, RetryError
from deltawire.store import Bucket, ObjectMeta
from deltawire.sync.chain.objects import with_retries
from deltawire.wire import keys
from deltawire.wire.coordination import (
    MAX_INTENT_BLOBS,
    MAX_INTENT_BYTES,
    DeletionIntent,
    decode_intent,
)
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run
from deltawire.wire.seal import seal

SWEEP_S = 600.0
"""How long after it was made a sweep may still delete."""

MARGIN_S = 300.0
"""How long a deletion that was not answered may take to happen."""


def store_clock(bucket: Bucket) -> datetime:
    """What the store's clock shows, by the age of an object written for the purpose."""
    bucket.put(keys.CLOCK, b"\n")
    entry = bucket.head(keys.CLOCK)
    if entry is None:
        raise CorruptError("an object just written is gone", run=bucket.url, key=keys.CLOCK)
    return entry.modified


def delete_blobs(
    bucket: Bucket, run: Run, doomed: Iterable[str], referred: Callable[[], set[str]]
) -> Iterator[str]:
    """Delete those blobs of ``doomed``, keys, that are not among ``referred()``, which is asked
    after it has been said what is to go, and must look at the bucket anew each time.

    Yields each key before it is deleted; the caller need not go on. Raises `RetryError` if the
    store does not answer: then the sweep stays, because a deletion may still be under way.
    """
    left = list(doomed)
    while left:
        batch, left = left[:MAX_INTENT_BLOBS], left[MAX_INTENT_BLOBS:]
        until = _uptime() + SWEEP_S
        key = keys.deletion_intent(secrets.token_hex(16))
        sweep = DeletionIntent(run=run.id, blobs=[name.removeprefix(keys.BLOBS) for name in batch])
        data = seal(sweep, key=key)
        with_retries(lambda key=key, data=data: bucket.put(key, data))  # type: ignore[misc]
        wanted = referred()
        for name in batch:
            if name in wanted:
                continue
            if _uptime() > until:
                left = []  # The next retention finds them again.
                break
            yield name
            with_retries(partial(_delete_before, until, bucket, name))
        with_retries(lambda key=key: bucket.delete(key))  # type: ignore[misc]


def _delete_before(until: float, bucket: Bucket, key: str) -> None:
    """Asking again is another deletion, which must not begin later than any other."""
    if _uptime() > until:
        raise RetryError("no time is left for a deletion to begin", run=bucket.url, key=key)
    bucket.delete(key)


def drop_dead_sweeps(bucket: Bucket, now: datetime) -> None:
    """Take away the sweeps of processes that died. ``now`` is by the store's clock."""
    for entry in with_retries(lambda: bucket.list_objects(keys.DELETION_INTENTS)):
        if _is_dead(entry, now):
            with_retries(lambda key=entry.key: bucket.delete(key))  # type: ignore[misc]


def blobs_stay(bucket: Bucket, run: Run, refs: Iterable[BlobRef]) -> bool:
    """Whether all of ``refs``, blobs of what has just been committed, are there and will stay.

    Waits for the sweeps that were begun before and name one of them. If the answer is no, what is
    missing must be put again; it then stays. Raises `RetryError` if the store does not answer.
    """
    sizes = {keys.blob(ref.hash): ref.bytes for ref in refs}
    if not sizes:
        return True
    sweeps = with_retries(lambda: bucket.list_objects(keys.DELETION_INTENTS))
    for entry in sweeps:
        _wait_for(bucket, run, entry, sizes.keys())
    return all(
        with_retries(lambda key=key: bucket.size(key)) == size  # type: ignore[misc]
        for key, size in sizes.items()
    )


def _wait_for(bucket: Bucket, run: Run, entry: ObjectMeta, names: Iterable[str]) -> None:
    try:
        data = with_retries(lambda: bucket.get(entry.key, limit=MAX_INTENT_BYTES))
        if data is None:
            return
        sweep = decode_intent(data, table=run, run=bucket.url, key=entry.key)
        if not {keys.blob(name) for name in sweep.blobs} & set(names):
            return
    except CorruptError:
        pass  # It may name anything.
    while with_retries(lambda: bucket.exists(entry.key)):
        if _is_dead(entry, with_retries(lambda: store_clock(bucket))):
            return
        time.sleep(bucket.poll_s)


def _uptime() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def _is_dead(entry: ObjectMeta, now: datetime) -> bool:
    return now - entry.modified > timedelta(seconds=SWEEP_S + MARGIN_S)
