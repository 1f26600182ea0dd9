"""Fail the store at each operation in turn, then audit the bucket.

Whatever happened: each committed version holds what was published for it, no committed manifest
ever changes, and a fresh publisher continues from the head.
"""

from contextlib import suppress

import pytest

from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.store import open_bucket
from deltawire.sync import Subscriber, chain, load_mirror, newest_version, read_manifest
from deltawire.testing.faulty import FaultyBucket, disk_full, no_answer
from deltawire.testing.tiny import audit, same_bits, start_publisher, start_run, weights
from deltawire.wire import keys

LAST = 6


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(chain, "FIRST_PAUSE_S", 0.0)


class History:
    """Trainers, one after another, on one bucket; and what each has tried to publish.

    Every life has weights of its own, so that a version published by one and encoded against
    another's baseline could not go unnoticed.
    """

    def __init__(self):
        self.bucket = FaultyBucket(open_bucket("memory://"))
        self.lives = 0
        self.attempts = {}
        self.committed = {}

    def live(self):
        """One trainer's life: from the head to the last version, or to the first error."""
        self.lives += 1
        publisher = start_publisher(self.bucket, anchor_every=3)
        try:
            while publisher.version < LAST:
                self.publish(publisher)
                publisher.flush()
        finally:
            with suppress(DeltawireError):
                publisher.close()

    def publish(self, publisher):
        version = publisher.version + 1
        tensors = weights(version, seed=self.lives if version else 0)
        self.attempts.setdefault(version, []).append(tensors)
        assert publisher.publish(tensors, annex={"life": self.lives}) == version

    def published(self, version):
        """What a committed version must hold, by the life that its manifest names."""
        run = start_run(self.bucket.inner)
        life = read_manifest(self.bucket.inner, run, version).annex["life"]
        wanted = weights(version, seed=life if version else 0)
        assert any(same_bits(wanted, tried) for tried in self.attempts[version])
        return wanted

    def audit(self):
        """Check everything that is committed; returns the newest version."""
        inner = self.bucket.inner
        newest = audit(inner, self.published)
        found = {k: inner.get(k, limit=1 << 20) for k in inner.list(keys.MANIFESTS)}
        assert sorted(found) == [keys.manifest(version) for version in range(newest + 1)]
        assert self.committed.items() <= found.items(), "a committed manifest has changed"
        self.committed = found
        run = start_run(inner) if newest >= 0 else None
        epochs = [read_manifest(inner, run, version).epoch for version in range(newest + 1)]
        assert epochs == sorted(epochs)
        return newest


def operations_of_a_clean_life():
    history = History()
    history.live()
    assert history.audit() == LAST
    operations = history.bucket.operations
    assert sum(key.startswith(keys.BLOBS) for _, key in operations) == 1 + 6 + 2
    assert sum(verb == "create" for verb, _ in operations) == 1 + 7
    return len(operations)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [no_answer, disk_full])
@pytest.mark.parametrize("times", [1, 3, None], ids=["once", "thrice", "until-restart"])
def test_each_operation_in_turn(done, error, times):
    count = operations_of_a_clean_life()
    lives = []
    for at in range(1, count + 1):
        history = History()
        history.bucket.fail(at=at, times=times, done=done, error=error)
        with suppress(DeltawireError):
            history.live()
        assert len(history.bucket.operations) >= at
        before = history.audit()
        if before < LAST:
            history.bucket.heal()
            history.live()
        assert history.audit() == LAST
        lives.append(history.lives)
    retried = error is no_answer and times is not None
    # Reads at the start are not retried; everything behind them is, and then nobody restarts.
    assert lives.count(2) >= (1 if retried else count - 3)
    assert lives.count(1) >= (count - 4 if retried else 0)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("key", ["weights/manifests/*", "weights/blobs/*"])
def test_lost_answers_cost_nothing_but_time(key, done):
    history = History()
    for at in range(1, 60, 2):
        history.bucket.fail("create", key, at=at, done=done)
    history.live()
    assert history.lives == 1
    assert history.audit() == LAST


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_the_read_back_may_fail_as_well(done):
    history = History()
    history.lives = 1
    publisher = start_publisher(history.bucket, anchor_every=3)
    for _ in range(LAST + 1):
        for verb in ("create", "get"):
            history.bucket.fail(verb, "weights/manifests/*", times=2, done=done)
        history.publish(publisher)
        publisher.flush()
        history.bucket.heal()
    publisher.close()
    tried = [key for verb, key in history.bucket.operations if verb == "create"]
    assert tried.count(keys.manifest(LAST)) == 3
    assert history.audit() == LAST


@pytest.mark.parametrize("error", [no_answer, disk_full])
@pytest.mark.parametrize("verb_and_key", [("put", "weights/blobs/*"), ("create", "*/manifests/*")])
@pytest.mark.parametrize("at", [2, 3])
def test_the_baseline_does_not_advance_before_the_commit(verb_and_key, at, error):
    """The trainer goes on with other weights under the same number: readers get just those."""
    history = History()
    publisher = start_publisher(history.bucket, anchor_every=3)
    published = []
    for version in range(at):
        published.append(weights(version))
        publisher.publish(published[-1])
    publisher.flush()
    reader = Subscriber(
        history.bucket.inner,
        publisher.run,
        load_mirror(history.bucket.inner, publisher.run),
        stepwise=True,
    )
    history.bucket.fail(*verb_and_key, times=None, error=error)
    for lost in range(3):
        assert publisher.publish(weights(at, seed=90 + lost)) == at
        with pytest.raises((RetryError, InputError)):
            publisher.flush()
        assert publisher.version == at - 1
        assert newest_version(history.bucket.inner) == at - 1
        assert reader.prepare() is None
    history.bucket.heal()
    for version in (at, at + 1, at + 2):
        published.append(weights(version, seed=50))
        assert publisher.publish(published[-1]) == version
    publisher.close()
    assert audit(history.bucket.inner, lambda version: published[version]) == at + 2
    for version in (at, at + 1, at + 2):
        reader.commit(reader.prepare())
        assert same_bits(reader.mirror.tensors, published[version])


@pytest.mark.parametrize("error", [no_answer, disk_full])
def test_a_commit_that_is_not_known_of_never_forks(error):
    """The manifest was created, no answer ever came: the publisher must not go on over it."""
    history = History()
    publisher = start_publisher(history.bucket, anchor_every=3)
    publisher.publish(weights(0))
    publisher.flush()
    history.bucket.fail("create", "*/manifests/*", times=None, done=True, error=error)
    history.bucket.fail("get", times=None)
    publisher.publish(weights(1))
    with pytest.raises((RetryError, InputError)):
        publisher.flush()
    history.bucket.heal()
    assert newest_version(history.bucket) == 1
    # It remembers its nonce, finds that it was the one, and builds on it.
    assert publisher.publish(weights(2)) == 2
    publisher.close()
    assert audit(history.bucket, weights) == 2
