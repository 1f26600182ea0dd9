"""Lease: the right of one process to write under a name of the run.

Each process that takes a name creates the next lease object of that name, which is never written
again. A process that was stopped, replaced and then resumed finds a lease above its own, raises
`FencedError` and ends without having written anything. Lease objects are separate from heartbeats
because a heartbeat that was in flight when its process was stopped may arrive late and overwrite
its successor's.
"""

from __future__ import annotations

import time

from deltawire.errors import FencedError
from deltawire.store import Bucket
from deltawire.wire import keys

FRESH_S = 6.0
"""How long a check of the lease remains valid: three heartbeats."""


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

    def acquire(self, first: int) -> None:
        """Create the lease with the lowest free number from ``first`` on."""
        self.number = first
        while not self._create():
            self.number += 1
        self._checked_at = time.monotonic()
        self.held = True

    def _create(self) -> bool:
        key = keys.lease(self._name, self.number)
        return self._bucket.create(key, self._nonce) or (
            self._bucket.get(key, limit=64) == self._nonce
        )

    @property
    def fresh(self) -> bool:
        """Returns whether the last check is still valid."""
        return time.monotonic() - self._checked_at <= FRESH_S

    def check(self, bucket: Bucket | None = None) -> None:
        """Look for a later lease; sets ``error`` if there is one."""
        bucket = bucket or self._bucket
        key = keys.lease(self._name, self.number + 1)
        if bucket.exists(key):
            self.error = FencedError(
                f"another process is {self._name} now",
                hint="this process was replaced while it did not respond; it stops",
                run=bucket.url,
                key=key,
            )
        self._checked_at = time.monotonic()

    def confirm(self, *, fresh: bool = False) -> None:
        """Raise `FencedError` if another process holds the name now.

        Relies on a check that is at most `FRESH_S` old, unless ``fresh`` asks for a new one. A
        process that was stopped for longer therefore checks before it writes. Does nothing until
        the lease is acquired; raises `RetryError` if the store does not answer.
        """
        if self.held and self.error is None and (fresh or not self.fresh):
            self.check()
        if self.error is not None:
            raise self.error
