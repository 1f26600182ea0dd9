"""Deletion intents: keep retention from deleting a blob that a committed version needs.

Concurrency::

    retention                                   writer
      1. announces which blobs it will delete     1. puts blobs
         (creates the intent)                     2. commits: creates the manifest
      2. reads manifests and compacted deltas     3. reads the intents that name its blobs, and
         again                                       waits until they are gone or expired
      3. deletes what nothing refers to           4. checks its blobs, puts what is missing
      4. deletes the intent

Each side announces its action before it reads the other side's announcements. So of an intent and a
commit at least one sees the other, wherever and for however long either side stalls:

- If step 2 of retention begins after the commit, it reads the manifest and keeps its blobs.
- Otherwise the intent existed before the commit. The writer either finds it and waits, or it is
  gone because every deletion is done. In both cases the writer checks its blobs after the last
  deletion, and the blobs that it puts again are named by a committed manifest, so that later
  retention keeps them.

Blob names cannot replace intents: a blob's name is the hash of its content, so a name that is
unused now may be needed by a version a moment later. Ages cannot replace them either: a writer or a
deleter may stall for longer than any grace period.

The wait is bounded. Retention begins no deletion later than `INTENT_S` after it created its intent,
by its own clock, and sends each request itself: nothing below repeats one. A request that got no
answer may still arrive, also after its repetition was answered, until the store refuses it as too
old (`margin_s`). So the intent is deleted only if every request was answered. Otherwise it stays
until its age, by the store's clock, exceeds the sum of both times, as does one that a process that
died left: writers then do not wait for it any more, and the next retention deletes it. Writers
ignore objects that are not intents of this run and, in a signed run, unsigned ones.

Conditional deletions do not replace this: obstore offers none, and a blob that is stored again has
the same content and so, where the tag is a hash of the content as on S3, the same tag.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from urllib.parse import urlsplit

from deltawire.errors import CorruptError, RetryError, UnreadableError
from deltawire.store import Bucket, ObjectMeta, RetryPolicy, in_parallel, without_retries
from deltawire.sync.chain.evidence import Absent, Sound, evidence_of, require_evidence
from deltawire.sync.chain.objects import check_signed, missing_blobs
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
"""Seconds after an intent's creation during which retention deletes what it announces."""

MARGIN_S = 300.0
"""Seconds after which an unanswered deletion in a folder or in memory has happened or never will: a
call of the operating system ends with its process, and a file server answers or repeats within
minutes."""

REMOTE_MARGINS_S = {
    # A request is refused when its time of signature is 15 minutes from the store's clock
    # (RequestTimeTooSkewed, MaxAllowedSkewMilliseconds 900000), and the clock that signed it may
    # have been 15 minutes ahead.
    "s3": 1800.0,
    # A request is accepted while its access token is valid: an hour unless an administrator allows
    # longer ones (iamcredentials.generateAccessToken).
    "gs": 3600.0,
    # With Shared Key, a request must be no more than 15 minutes old when it arrives; with Microsoft
    # Entra ID, tokens are valid for 60 to 90 minutes.
    "az": 5400.0,
}
"""For each kind of store, the seconds during which an unanswered request can still arrive."""


def margin_s(bucket: Bucket) -> float:
    """Returns how many seconds after it was sent an unanswered deletion may still take effect."""
    if bucket.local:
        return MARGIN_S
    kind = {"s3a": "s3", "gcs": "gs"}.get(scheme := urlsplit(bucket.url).scheme, scheme)
    return REMOTE_MARGINS_S.get(kind, max(REMOTE_MARGINS_S.values()))


def store_clock(bucket: Bucket) -> datetime:
    """Reads the store's clock from an object written for that purpose."""
    bucket.put(keys.CLOCK, b"\n")
    read = partial(bucket.head, keys.CLOCK)
    entry = require_evidence(bucket, keys.CLOCK, read, so="its time is unknown")
    if entry is None:
        raise CorruptError(
            "an object that was just written is missing", run=bucket.url, key=keys.CLOCK
        )
    return entry.modified


def delete_blobs(
    bucket: Bucket,
    run: Run,
    doomed: Iterable[str],
    referred: Callable[[], set[str]],
    *,
    signer: Signer | None = None,
) -> Iterator[str]:
    """Deletes the blobs with keys in ``doomed`` that are not in ``referred()``, which is called
    after each intent is created and must read the bucket again each time.

    Yields each key before deleting it; the caller may stop early. Raises `RetryError` if the store
    does not answer. The intent stays if a deletion may still be in flight.
    """
    left = list(doomed)
    inner = without_retries(bucket)
    while left:
        batch, left = left[:MAX_INTENT_BLOBS], left[MAX_INTENT_BLOBS:]
        until = _uptime() + INTENT_S
        key = keys.deletion_intent(secrets.token_hex(16))
        names = [name.removeprefix(keys.BLOBS) for name in batch]
        intent = DeletionIntent(run=run.id, blobs=names)
        bucket.put(key, seal(intent, key=key, signer=signer))
        try:
            wanted = referred()
        except UnreadableError:
            bucket.delete(key)  # No deletion has begun.
            raise
        deletions = _Deletions(inner, until)
        for name in batch:
            if name in wanted:
                continue
            if _uptime() > until:
                left = []  # The next retention finds them again.
                break
            yield name
            RetryPolicy().run(partial(deletions.delete, name))
        if deletions.all_answered:
            bucket.delete(key)


class _Deletions:
    """Sends deletions, each as one request, none later than ``until``; ``all_answered`` says
    whether none is in flight."""

    def __init__(self, bucket: Bucket, until: float) -> None:
        self.all_answered = True
        self._bucket = bucket
        self._until = until

    def delete(self, key: str) -> None:
        """Deletes an object, unless it is too late; raises `RetryError`."""
        if _uptime() > self._until:
            raise RetryError("the time for this deletion is over", run=self._bucket.url, key=key)
        try:
            self._bucket.delete(key)
        except RetryError:
            self.all_answered = False
            raise


def drop_dead_intents(bucket: Bucket, now: datetime) -> None:
    """Deletes the intents of processes that died. ``now`` is by the store's clock."""
    for entry in bucket.list_objects(keys.DELETION_INTENTS):
        if _is_dead(bucket, entry, now):
            bucket.delete(entry.key)


LISTINGS = 2
"""How often intents are listed: one that a single short listing left out would take a blob after
the check."""


def blobs_stay(
    bucket: Bucket,
    run: Run,
    refs: Iterable[BlobRef],
    *,
    unsigned: bool = False,
    listed: Sequence[ObjectMeta] | None = None,
) -> bool:
    """Returns whether ``refs``, the blobs of an object just committed, all exist and will stay.

    Waits for the earlier intents that name one of them; ``unsigned`` ones count too in a signed run
    where retention has no key. ``listed`` has the intents of `LISTINGS` listings that the caller
    made after the commit. If the result is False, the caller must put the missing blobs again;
    they then stay. Raises `RetryError` if the store does not answer.
    """
    blobs = {keys.blob(ref.hash): ref for ref in refs}
    if not blobs:
        return True
    if listed is None:
        places = [keys.DELETION_INTENTS] * LISTINGS
        listed = list(chain.from_iterable(in_parallel(bucket, bucket.list_objects, places)))
    for entry in {entry.key: entry for entry in listed}.values():
        if blobs.keys() & _named_by(bucket, run, entry, unsigned=unsigned):
            _wait_for(bucket, entry)
    return not missing_blobs(bucket, list(blobs.values()))


def _named_by(bucket: Bucket, run: Run, entry: ObjectMeta, *, unsigned: bool) -> set[str]:
    """Returns the keys of the blobs that an intent names; empty if retention did not write it."""

    def read() -> DeletionIntent | None:
        data = bucket.get(entry.key, limit=MAX_INTENT_BYTES)
        if data is None:
            return None
        if not unsigned:
            check_signed(bucket, run, data, entry.key)
        return decode_intent(data, table=run, run=bucket.url, key=entry.key)

    found = evidence_of(bucket, entry.key, read)
    # One that no connection delivers whole is no intent: retention stores each in one piece. If it
    # counted, anyone who stores a byte there could hold every writer up.
    return {keys.blob(name) for name in found.value.blobs} if isinstance(found, Sound) else set()


def _wait_for(bucket: Bucket, entry: ObjectMeta) -> None:
    read = partial(bucket.head, entry.key)
    while not isinstance(evidence_of(bucket, entry.key, read), Absent):
        if _is_dead(bucket, entry, store_clock(bucket)):
            return
        time.sleep(bucket.poll_s)


def _uptime() -> float:
    """Returns the seconds of a clock that also advances while the machine sleeps, if it has one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def _is_dead(bucket: Bucket, entry: ObjectMeta, now: datetime) -> bool:
    return now - entry.modified > timedelta(seconds=INTENT_S + margin_s(bucket))
