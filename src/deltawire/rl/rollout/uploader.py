"""Uploads finished groups in order."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

from deltawire.errors import BugError, DeltawireError, FencedError, RetryError
from deltawire.events import Generated
from deltawire.runtime.process import Process
from deltawire.store import Bucket
from deltawire.sync.chain.objects import with_retries
from deltawire.wire import keys
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group, encode_group


class Uploader(threading.Thread):
    """Stores finished groups in sequence, each by one create, and tells how many there are."""

    def __init__(self, bucket: Bucket, worker: str, first: int, process: Process) -> None:
        super().__init__(name="uploader", daemon=True)
        self.stored = first
        self.error: DeltawireError | None = None
        self._bucket = bucket
        self._worker = worker
        self._process = process
        self._queue: queue.Queue[Group | None] = queue.Queue()

    def submit(self, group: Group) -> None:
        """Hand over a finished group."""
        self._queue.put(group)

    def run(self) -> None:
        """The thread itself."""
        while (group := self._queue.get()) is not None:
            try:
                data = encode_group(group)
                with_retries(lambda data=data, group=group: self._store(group, data))  # type: ignore[misc]
            except DeltawireError as error:
                self.error = error
                return
            except Exception as error:  # A thread that ends in silence stores nothing ever after.
                fault = f"cannot store a group: {type(error).__name__}: {error}"
                self.error = BugError(fault, run=self._bucket.url)
                return
            versions = sorted({int(v) for t in group.trajectories for v in t.versions_T})
            sound = [t.reward for t in group.trajectories if not t.cause]
            causes = [t.cause for t in group.trajectories if t.cause]
            self._process.events.record(
                Generated(
                    process=self._worker,
                    at=time.time(),
                    sequence=self.stored,
                    versions=versions,
                    reward_mean=float(np.mean(sound)) if sound else 0.0,
                    tokens=group.tokens,
                    failed=len(causes),
                    cause=causes[0] if causes else "",
                )
            )
            self.stored += 1
            self._process.heart.achieve()

    def _store(self, group: Group, data: bytes) -> None:
        """Create the next object. One that is already there is this put's own, seen late; or was
        still on its way when the process before this one died, and this one's is the next; or
        another process's under the same name: then this one stops."""
        while True:
            self._process.heart.confirm()
            key = keys.rollout(self._worker, self.stored)
            if self._bucket.create(key, data):
                return
            there = self._bucket.get(key, limit=MAX_GROUP_BYTES)
            if there is None:
                raise RetryError("a group is gone again", run=self._bucket.url, key=key)
            if decode_group(there, run=self._bucket.url, key=key).nonce == group.nonce:
                return
            if not self._process.heart.confirm(anew=True):
                raise FencedError(
                    f"another process stores groups as worker {self._worker}",
                    hint="give each worker its own --id",
                    run=self._bucket.url,
                    key=key,
                )
            self.stored += 1

    def close(self) -> None:
        """Store what was handed over, then stop."""
        self._queue.put(None)
        if self.is_alive():
            self.join(timeout=60)
