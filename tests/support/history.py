"""Records what drills tried to publish, and checks the bucket afterwards."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import lru_cache

import blake3

from deltawire.errors import DeltawireError
from deltawire.store import open_bare_bucket
from deltawire.sync import (
    Subscriber,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing import tiny
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher
from deltawire.wire import keys

LIMIT = 1 << 20
_HASH = re.compile(rb'"hash":"([0-9a-f]{64})"')


@lru_cache(maxsize=4096)
def weights(version, *, seed=0):
    """`tiny.weights`, computed once."""
    return tiny.weights(version, seed=seed)


class History:
    """Successive trainers on one bucket, and what each tried to publish.

    Every life has different weights, so that a version published by one and encoded against
    another's baseline could not go unnoticed.
    """

    def __init__(self, bucket, *, last=6):
        self.bucket = FaultyBucket(bucket)
        self.last = last
        self.lives = 0
        self.attempts = {}
        self.acknowledged = -1
        self.committed = {}

    def live(self):
        """Runs one trainer from the head to the last version, or to the first error."""
        self.lives += 1
        publisher = start_publisher(self.bucket, anchor_every=3)
        try:
            while publisher.version < self.last:
                self.publish(publisher)
                publisher.flush()
                self.acknowledged = max(self.acknowledged, publisher.version)
        finally:
            with suppress(DeltawireError):
                publisher.close()

    def publish(self, publisher):
        version = publisher.version + 1
        tensors = weights(version, seed=self.lives if version else 0)
        self.attempts.setdefault(version, []).append(tensors)
        assert publisher.publish(tensors, metadata={"life": self.lives}) == version

    def published(self, version, *, bucket=None):
        """Returns what a committed version must hold, by the life that its manifest names."""
        bucket = bucket or self.bucket.inner
        life = read_manifest(bucket, read_run(bucket), version).metadata["life"]
        wanted = weights(version, seed=life if version else 0)
        assert any(same_bits(wanted, tried) for tried in self.attempts[version])
        return wanted

    def audit(self):
        """Check everything that is committed; returns the newest version."""
        inner = snapshot(self.bucket.inner)
        newest = check_bucket(inner, lambda version: self.published(version, bucket=inner))
        assert newest >= self.acknowledged, "a version whose commit was answered is gone"
        found = {key: inner.get(key, limit=LIMIT) for key in inner.list(keys.MANIFESTS)}
        assert self.committed.items() <= found.items(), "a committed manifest has changed"
        self.committed = found
        return newest


def snapshot(bucket):
    """Copies a whole bucket into memory, reading each object once."""
    copy = open_bare_bucket("memory://")
    names = bucket.list("")

    def read(key):
        return bucket.get(key, limit=LIMIT)

    with ThreadPoolExecutor(4) if bucket.url.startswith("s3:") else nullcontext() as threads:
        found = (threads.map if threads else map)(read, names)
        for key, data in zip(names, found, strict=True):
            copy.put(key, data)
    return copy


def check_bucket(bucket, expected):
    """Runs `tiny.audit`, and checks unreferenced blobs and the whole chain.

    Returns the newest version.
    """
    stored = {key: bucket.get(key, limit=LIMIT) for key in bucket.list("weights/")}
    for key, data in stored.items():
        if key.startswith(keys.BLOBS):
            assert key == keys.blob(blake3.blake3(data).hexdigest()), "a half blob"
        else:
            wanted = {keys.blob(found.decode()) for found in _HASH.findall(data)}
            assert wanted <= stored.keys(), f"{key} names blobs that are not there"
    newest = tiny.audit(bucket, expected)
    manifests = [key for key in stored if key.startswith(keys.MANIFESTS)]
    assert sorted(manifests) == [keys.manifest(version) for version in range(newest + 1)]
    if newest >= 0:
        found = check_run(bucket, deep=False)  # The deep checks are done here, in another way.
        assert not found.faults
        assert found.newest == newest
        run = read_run(bucket)
        epochs = [read_manifest(bucket, run, version).epoch for version in range(newest + 1)]
        assert epochs == sorted(epochs)
        follow(bucket, 0, newest, expected)
    return newest


def follow(bucket, start, last, expected):
    """Joins at a version and follows to the last; every version on the way has the right bits."""
    run = read_run(bucket)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=start))
    while True:
        mirror = subscriber.mirror
        assert same_bits(mirror.tensors, expected(mirror.version))
        update = subscriber.prepare()
        if update is None:
            assert mirror.version == last == newest_version(bucket)
            return
        subscriber.commit(update)
