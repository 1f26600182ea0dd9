"""Uploader: stores a worker's finished groups in order."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

from deltawire.errors import (
    BugError,
    CorruptError,
    DeltawireError,
    FencedError,
    InputError,
    RetryError,
)
from deltawire.events import Generated
from deltawire.runtime.process import Process
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group, encode_group


class Uploader(threading.Thread):
    """Stores finished groups in sequence, one object each, in a thread.

    ``stored`` is the sequence number of the next group. ``error`` holds the error that ended the
    thread; `raise_error` raises it.
    """

    def __init__(self, bucket: Bucket, worker: str, first: int, process: Process) -> None:
        super().__init__(name="uploader", daemon=True)
        self.stored = first
        self.error: DeltawireError | None = None
        self._bucket = bucket
        self._worker = worker
        self._process = process
        self._queue: queue.Queue[Group | None] = queue.Queue()

    def submit(self, group: Group) -> None:
        """Queues a finished group."""
        self._queue.put(group)

    def run(self) -> None:
        """Stores queued groups until `close`."""
        while (group := self._queue.get()) is not None:
            try:
                data = encode_group(group)
                if len(data) > MAX_GROUP_BYTES:
                    raise InputError(
                        f"a group has {len(data)} bytes, the limit is {MAX_GROUP_BYTES}",
                        hint="lower rollout.group_size or rollout.max_tokens",
                        run=self._bucket.url,
                    )
                self._store(group, data)
            except DeltawireError as error:
                self.error = error
                return
            except Exception as error:  # A silent end would stop all uploads.
                fault = f"cannot store a group: {type(error).__name__}: {error}"
                self.error = BugError(fault, run=self._bucket.url)
                return
            self._record(group)
            self.stored += 1
            self._process.heartbeat.count_finished()

    def _record(self, group: Group) -> None:
        versions = sorted({int(v) for t in group.trajectories for v in t.versions_T})
        rewards = [t.reward for t in group.trajectories if not t.cause]
        causes = [t.cause for t in group.trajectories if t.cause]
        self._process.events.record(
            Generated(
                process=self._worker,
                at=time.time(),
                sequence=self.stored,
                versions=versions,
                reward_mean=float(np.mean(rewards)) if rewards else 0.0,
                tokens=group.tokens,
                failed=len(causes),
                cause=causes[0] if causes else "",
            )
        )

    def _store(self, group: Group, data: bytes) -> None:
        """Creates the next object.

        An object that exists already is one of three. It is this request's, whose answer was lost.
        It is a predecessor's group that was still in flight, or another writer's object: then the
        next number is tried. Or another process with the same name stored it: then this one stops.
        """
        while True:
            self._process.lease.confirm()
            key = keys.rollout(self._worker, self.stored)
            if self._bucket.create(key, data):
                return
            existing = self._existing(key)
            if existing is None:
                raise RetryError("a stored group disappeared again", run=self._bucket.url, key=key)
            if self._nonce_in(existing, key) == group.nonce:
                return
            self._process.lease.confirm(fresh=True)
            if not self._process.lease.held:
                raise FencedError(
                    f"another process stores groups as worker {self._worker}",
                    hint="give each worker its own --id",
                    run=self._bucket.url,
                    key=key,
                )
            self.stored += 1

    def _existing(self, key: str) -> bytes | None:
        try:
            return self._bucket.get(key, limit=MAX_GROUP_BYTES)
        except CorruptError:
            return b""  # It is larger than any group.

    def _nonce_in(self, data: bytes, key: str) -> str:
        """The nonce of a stored group; empty if the object is not a group, because others can write
        here too."""
        try:
            return decode_group(data, run=self._bucket.url, key=key).nonce
        except CorruptError:
            return ""

    def raise_error(self) -> None:
        """Raises the error that ended the thread, if one did."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stores the queued groups, then stops the thread."""
        self._queue.put(None)
        if self.is_alive():
            self.join(timeout=60)
