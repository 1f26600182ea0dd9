"""Implements leases: the right of one process to write under a name of the run.

Each process that takes a name creates the next lease object of that name, which is never written
again. A process that was stopped, replaced and then resumed finds a lease above its own, raises
`FencedError` and ends without writing anything. Lease objects are separate from heartbeats because
a heartbeat that was in flight when its process was stopped may arrive late and overwrite its
successor's.

The trainer deletes the leases of a worker that has been gone for a long time
(`deltawire.runtime.reaper`). If the worker was only stopped, it acquires its lease again unless the
name had a later holder.
"""

from __future__ import annotations

import contextlib
import time

from deltawire.errors import CorruptError, FencedError, SignatureError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import Unknown, evidence_of
from deltawire.wire import keys
from deltawire.wire.objects import decode_json
from deltawire.wire.status import MAX_STATUS_BYTES, Heartbeat

FRESH_S = 6.0
"""How long a check of the lease remains valid, in seconds: three heartbeats."""
MAX_NONCE = 64
MAX_SKIPPED = 100
"""The most objects that one check skips because they are not leases of the signed run."""


class Lease:
    """Holds a name on behalf of one process.

    Example::

        lease = Lease(bucket, "w0", nonce="5f3a")
        lease.acquire(0)
        lease.confirm()  # before each write that could harm another process
    """

    def __init__(self, bucket: Bucket, name: str, nonce: str) -> None:
        self.number = 0
        self.held = False
        self.error: FencedError | None = None
        self._bucket = bucket
        self._name = name
        self._nonce = nonce.encode()
        self._checked_at = time.monotonic()
        self._following = 1
        """The lowest number that a successor's lease may have."""

    def acquire(self, first: int) -> None:
        """Creates the lease with the lowest free number from ``first`` on."""
        self.number = first
        while not self._create():
            self.number += 1
        self._following = self.number + 1
        self._checked_at = time.monotonic()
        self.held = True

    def _create(self) -> bool:
        if self._bucket.create(self._key, self._nonce):
            return True
        try:
            return self._bucket.get(self._key, limit=MAX_NONCE) == self._nonce
        except SignatureError:
            return False  # The next number is tried: two leases of one process harm nothing.

    @property
    def fresh(self) -> bool:
        """Returns whether the last check is still valid."""
        return time.monotonic() - self._checked_at <= FRESH_S

    def check(self, bucket: Bucket | None = None) -> None:
        """Looks for a later lease; sets ``error`` if there is one.

        In a signed run, objects that the name's key did not sign do not count and are skipped.
        """
        bucket = bucket or self._bucket
        replaced = self._has_successor(bucket)
        # The trainer can have deleted only the lease of a process that did not check for a long
        # time.
        if not replaced and not self.fresh and not bucket.exists(self._key):
            replaced = self._newest_holder(bucket) > self.number
            if not replaced:
                bucket.create(self._key, self._nonce)
        if replaced:
            self.error = FencedError(
                f"another process now has the name {self._name}",
                hint="this process was replaced while it did not respond; it stops",
                run=bucket.url,
                key=keys.lease(self._name, self._following),
            )
        self._checked_at = time.monotonic()

    @property
    def _key(self) -> str:
        return keys.lease(self._name, self.number)

    def _has_successor(self, bucket: Bucket) -> bool:
        for _ in range(MAX_SKIPPED):
            key = keys.lease(self._name, self._following)
            if not bucket.exists(key):
                return False
            if not self._is_foreign(bucket, key):
                return True
            self._following += 1
        return False

    def _is_foreign(self, bucket: Bucket, key: str) -> bool:
        found = evidence_of(bucket, key, lambda: bucket.get(key, limit=MAX_NONCE))
        # In an unsigned run any object counts as a lease. In a signed one, an object that no
        # connection delivers with a signature is nobody's, or anyone could end this process.
        return isinstance(found, Unknown) and isinstance(found.error, SignatureError)

    def _newest_holder(self, bucket: Bucket) -> int:
        """Returns the highest lease number of the name, according to its leases and last
        heartbeats.
        """
        numbers = [-1]
        for listed in reversed(bucket.list(keys.leases_of(self._name))[-MAX_SKIPPED:]):
            number = keys.trailing_number(listed)
            if number is not None and not self._is_foreign(bucket, listed):
                numbers.append(number)
                break
        for key in (keys.heartbeat(self._name), keys.tombstone(self._name)):
            with contextlib.suppress(CorruptError):
                # The leases that are left decide; a heartbeat only adds to them.
                if data := bucket.get(key, limit=MAX_STATUS_BYTES):
                    numbers.append(decode_json(data, Heartbeat, run=bucket.url, key=key).lease)
        return max(numbers)

    def confirm(self, *, fresh: bool = False) -> None:
        """Raises `FencedError` if another process holds the name now.

        Relies on a check that is at most `FRESH_S` old, unless ``fresh`` asks for a new one. A
        process that was stopped for longer therefore checks before it writes. Does nothing until
        the lease is acquired; raises `RetryError` if the store does not answer.
        """
        if self.held and self.error is None and (fresh or not self.fresh):
            self.check()
            if self.error is None:
                self.check()  # One wrong *not found* must not let a replaced process write.
        if self.error is not None:
            raise self.error
