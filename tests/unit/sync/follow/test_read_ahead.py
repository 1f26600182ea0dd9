"""Catching up over a network takes few round trips."""

from __future__ import annotations

import threading
import time

import blake3
import pytest

from deltawire.errors import RetryError
from deltawire.store import open_bare_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import Subscriber, load_mirror
from deltawire.sync.follow.read_ahead import ReadAhead
from deltawire.testing import tiny
from deltawire.wire import keys
from deltawire.wire.payload import BlobRef


class RemoteBucket(DelegatingBucket):
    """Counts how many requests follow one another: requests that overlap count once."""

    def __init__(self, inner):
        super().__init__(inner)
        self.local = False
        self.rounds = 0
        self.failing = 0
        self._running = 0
        self._lock = threading.Lock()

    def _call(self, verb, key, operation):
        with self._lock:
            self.rounds += self._running == 0
            self._running += 1
            fails, self.failing = self.failing > 0, max(0, self.failing - 1)
        try:
            time.sleep(0.1)  # Long enough for all threads to begin theirs, on a busy machine.
            if fails:
                raise RetryError("no answer")
            return operation()
        finally:
            with self._lock:
                self._running -= 1


def test_a_lagging_reader_catches_up_in_few_round_trips():
    inner = open_bare_bucket("memory://")
    run = tiny.start_run(inner)
    publisher = tiny.start_publisher(inner)
    for version in range(2):
        publisher.publish(tiny.weights(version))
    publisher.flush()
    bucket = RemoteBucket(inner)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run))
    rounds, published = [], 1
    for _ in range(4):
        for _ in range(5):
            published += 1
            publisher.publish(tiny.weights(published))
        publisher.flush()
        bucket.rounds = 0
        while subscriber.mirror.version < publisher.version:
            subscriber.commit(subscriber.prepare())
        rounds.append(bucket.rounds)
    assert rounds[-1] <= 7, f"{rounds}: one a version, and one more to find it, would be 10"
    assert subscriber.mirror.digest == publisher.digest == subscriber.mirror.compute_held()
    publisher.close()


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_request_that_failed_is_repeated_when_the_blob_is_needed(failing):
    bucket = RemoteBucket(open_bare_bucket("memory://"))
    blobs = [b"a" * 10, b"b" * 20, b"c" * 30]
    refs = [BlobRef(hash=blake3.blake3(data).hexdigest(), bytes=len(data)) for data in blobs]
    for ref, data in zip(refs, blobs, strict=True):
        bucket.inner.put(keys.blob(ref.hash), data)
    bucket.failing = failing
    ahead = ReadAhead(bucket)
    ahead.expect(refs)
    assert [ahead.get(keys.blob(ref.hash), limit=100) for ref in refs] == blobs
