"""Retention and a writer that was stalled for longer than the grace, one step of each at a time.

The writer's blobs are stored, old and not referenced, and it is about to commit. It commits before
each operation of retention in turn; in every case its committed versions can be read at the end.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from history import LIMIT, snapshot, weights
from shard_ranks import RANKS, close, publish_all, rank_publisher

from deltawire.errors import RetryError, UnreadableError
from deltawire.store import MeteredBucket, RetryingBucket, open_bare_bucket
from deltawire.sync import Compactor, Relay, load_mirror, read_manifest, read_run
from deltawire.sync.chain import gc_intents as intents
from deltawire.sync.chain.objects import read_compacted_delta
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.chain.retention import prune
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket, no_answer
from deltawire.testing.tiny import same_bits, start_publisher
from deltawire.wire import keys
from deltawire.wire.coordination import DeletionIntent
from deltawire.wire.seal import seal

LAST = 5
OPERATIONS = 400
"""Pruning the small run takes fewer operations; the tests check it."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("deltawire.store.retrying.FIRST_PAUSE_S", 0.0)


def publish(bucket, first, last, **options):
    publisher = start_publisher(bucket, anchor_every=3, **options)
    for version in range(first, last + 1):
        publisher.publish(weights(version))
    publisher.close()


@pytest.fixture(scope="module")
def original():
    bucket = open_bare_bucket("memory://")
    publish(bucket, 0, LAST)
    return bucket


class OnePublisher:
    """Version 6, a delta and an anchor."""

    def __init__(self, bucket):
        self.publisher = start_publisher(bucket, anchor_every=3)

    def commit(self):
        self.publisher.publish(weights(LAST + 1))
        self.publisher.flush()
        self.publisher.close()


class Ranks:
    """The same from three ranks."""

    def __init__(self, bucket):
        run = read_run(bucket)
        digest = load_mirror(bucket, run, at=LAST).digest
        self.ranks = [
            rank_publisher(bucket, rank, version=LAST, digest=digest, session="s9", epoch=9)
            for rank in range(RANKS)
        ]

    def commit(self):
        assert publish_all(self.ranks, LAST + 1) == [None] * RANKS
        close(self.ranks)


class Carrier:
    """The same from another bucket."""

    def __init__(self, bucket):
        source = snapshot(bucket)
        publish(source, LAST + 1, LAST + 1)
        self.relay = Relay(source, bucket, strides=(), retain=False)

    def commit(self):
        assert self.relay.advance() == 1
        self.relay.close()


class Compaction:
    """A compacted delta to version 4. It may be missing, but must not lack blobs."""

    def __init__(self, bucket):
        self.compactor = Compactor(bucket, read_run(bucket), (2,), threads=1)

    def commit(self):
        self.compactor.compact_up_to(4)


WRITERS = {
    "publisher": (OnePublisher, "weights/manifests/*"),
    "ranks": (Ranks, "weights/manifests/*"),
    "relay": (Carrier, "weights/manifests/*"),
    "compactor": (Compaction, "weights/compacted/*"),
}


class Turns:
    """A writer that stands before its commit until retention has come to an operation, and
    retention that stands there until the writer has finished, or waits for it."""

    def __init__(self, inner, kind, monkeypatch):
        self.inner = inner
        self.committing, self.go, self.settled = (threading.Event() for _ in range(3))
        bucket = FaultyBucket(inner)
        make, key = WRITERS[kind]
        self.writer = make(bucket)
        bucket.pause("create", key, wait=self._stall)
        monkeypatch.setattr(intents, "time", SimpleNamespace(**vars(time) | {"sleep": self._wait}))

    def _stall(self):
        self.committing.set()
        assert self.go.wait(120)

    def _wait(self, seconds):
        """The writer waits for an intent: it is retention's turn again."""
        self.settled.set()
        time.sleep(0.001)

    def _release(self):
        self.go.set()
        assert self.settled.wait(120)

    def prune_around_the_commit(self, at, *, done=False):
        """True if retention reached its ``at``-th operation."""
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(self.writer.commit)
            writing.add_done_callback(lambda _: self.settled.set())
            assert self.committing.wait(120)
            bucket = FaultyBucket(self.inner)
            bucket.pause(wait=self._release, at=at, done=done)
            try:
                found = prune(RetryingBucket(bucket), read_run(self.inner), cutoff=LAST, grace_s=0)
            finally:
                self.go.set()
            assert found.blobs
            writing.result(120)
        self.operations = bucket.operations
        return len(bucket.operations) >= at


def assert_whole(bucket, newest):
    found = check_run(bucket)
    assert (found.whole, found.faults, found.newest) == (True, [], newest)
    run = read_run(bucket)
    for version in range(found.floor, newest + 1):
        assert same_bits(load_mirror(bucket, run, at=version).tensors, weights(version))
    for key in bucket.list(keys.COMPACTED):
        compacted = read_compacted_delta(bucket, run, *keys.compacted_of(key))
        assert all(
            bucket.size(keys.blob(ref.hash)) == ref.bytes
            for ref in read_blobs(bucket, run, compacted.payload)
        )


@pytest.mark.parametrize("kind", WRITERS)
def test_a_commit_before_each_operation_of_retention(original, kind, monkeypatch):
    waited = restored = 0
    for at in range(1, OPERATIONS):
        inner = snapshot(original)
        turns = Turns(inner, kind, monkeypatch)
        reached = turns.prune_around_the_commit(at)
        assert_whole(inner, LAST if kind == "compactor" else LAST + 1)
        assert not inner.list(keys.DELETION_INTENTS)
        if not reached:
            break
        # Blobs that were deleted although the version counts on them had to be put again.
        verb, key = turns.operations[at - 1]
        waited += verb == "delete" and key.startswith(keys.BLOBS)
        restored += verb == "delete" and key.startswith(keys.DELETION_INTENTS)
    assert not reached
    assert (
        waited > 1
    )  # Among these are moments at which a check without waiting would have found everything there.
    assert restored == 1


def test_without_the_intent_a_check_after_the_commit_is_too_early(original, monkeypatch):
    """The test above would notice: what both did before they told each other."""
    monkeypatch.setattr(intents, "_wait_for", lambda *_: None)
    lost = 0
    for at in range(1, OPERATIONS):
        inner = snapshot(original)
        reached = Turns(inner, "publisher", monkeypatch).prune_around_the_commit(at)
        lost += not check_run(inner).whole
        if not reached:
            break
    assert lost > 0


def one_blob(bucket, version):
    (ref,) = read_blobs(
        bucket, read_run(bucket), read_manifest(bucket, read_run(bucket), version).delta
    )
    return ref.hash


def left_behind(bucket, blobs, *, run=None):
    """An intent whose maker died."""
    key = keys.deletion_intent("dead")
    run = run or read_run(bucket)
    bucket.put(key, seal(DeletionIntent(run=run.id, blobs=blobs), key=key))
    return key


@pytest.mark.parametrize("kind", ["named", "damaged"])
def test_an_intent_whose_maker_died_delays_no_longer_than_it_may_delete(
    original, kind, monkeypatch
):
    """A damaged intent, or a junk object, delays no writer."""
    inner = snapshot(original)
    publish(inner, LAST + 1, LAST + 1)
    doomed = one_blob(inner, LAST + 1)
    inner = snapshot(original)
    key = left_behind(inner, [doomed])
    if kind == "damaged":
        inner.put(key, inner.get(key, limit=LIMIT)[:-9])
    now = [0.0]
    slept = []

    def clock(bucket):
        return later(real(bucket), now[0])

    def sleep(seconds):
        slept.append(seconds)
        now[0] += 100.0

    def later(moment, seconds):
        from datetime import timedelta

        return moment + timedelta(seconds=seconds)

    real = intents.store_clock
    monkeypatch.setattr(intents, "store_clock", clock)
    monkeypatch.setattr("deltawire.sync.chain.retention.store_clock", clock)
    monkeypatch.setattr(intents, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    publish(inner, LAST + 1, LAST + 1)
    expected = (intents.INTENT_S + intents.MARGIN_S) / 100 if kind == "named" else 0
    assert len(slept) == expected
    assert_whole(inner, LAST + 1)
    prune(inner, read_run(inner), cutoff=0, grace_s=0)
    assert bool(inner.list(keys.DELETION_INTENTS)) == (kind == "damaged")


def test_an_intent_that_names_other_blobs_delays_no_writer(original, monkeypatch):
    inner = snapshot(original)
    left_behind(inner, [one_blob(inner, 1)])
    monkeypatch.setattr(intents, "time", SimpleNamespace(**vars(time) | {"sleep": pytest.fail}))
    publish(inner, LAST + 1, LAST + 1)
    assert_whole(inner, LAST + 1)
    # It is young by the store's clock: its maker may be alive.
    prune(inner, read_run(inner), cutoff=0, grace_s=0)
    assert inner.list(keys.DELETION_INTENTS)


def test_nothing_is_deleted_later_than_writers_wait(original, monkeypatch):
    """Retention that was stalled between two deletions goes no further, by its own clock."""
    inner = snapshot(original)
    bucket = FaultyBucket(inner)
    now = [0.0]
    monkeypatch.setattr(intents, "_uptime", lambda: now[0])

    def stall():
        now[0] += intents.INTENT_S + 1

    bucket.pause("delete", "weights/blobs/*", wait=stall, at=2)
    run = read_run(inner)
    found = prune(RetryingBucket(bucket), run, cutoff=LAST, grace_s=0)
    deleted = [key for verb, key in bucket.operations if verb == "delete" and keys.BLOBS in key]
    assert deleted == found.blobs
    assert len(deleted) == 2
    assert not inner.list(keys.DELETION_INTENTS)
    assert len(prune(RetryingBucket(bucket), run, cutoff=LAST, grace_s=0).blobs) == 1
    assert_whole(inner, LAST)


def test_a_deletion_is_not_asked_for_again_later_than_writers_wait(original, monkeypatch):
    """Each answer that does not come takes its time: asking again is beginning again."""
    inner = snapshot(original)
    bucket = FaultyBucket(inner)
    now = [0.0]
    monkeypatch.setattr(intents, "_uptime", lambda: now[0])
    begun = []

    def not_answered(verb, key):
        begun.append(now[0])
        now[0] += intents.INTENT_S / 2.5
        return no_answer(verb, key)

    bucket.fail("delete", "weights/blobs/*", times=None, error=not_answered)
    with pytest.raises(RetryError, match="time for this deletion is over"):
        prune(RetryingBucket(bucket), read_run(inner), cutoff=LAST, grace_s=0)
    assert begun
    assert max(begun) <= intents.INTENT_S
    assert len(inner.list(keys.DELETION_INTENTS)) == 1


def test_a_deletion_that_was_not_answered_leaves_the_intent(original):
    inner = snapshot(original)
    bucket = FaultyBucket(inner)
    bucket.fail("delete", "weights/blobs/*", times=None, error=no_answer)
    with pytest.raises(RetryError):
        prune(RetryingBucket(bucket), read_run(inner), cutoff=LAST, grace_s=0)
    assert len(inner.list(keys.DELETION_INTENTS)) == 1


def test_a_delete_that_arrives_after_its_repetition_was_answered_takes_no_blob(
    original, monkeypatch
):
    """The writer of the same blobs waits as long as a request without an answer may arrive."""
    inner, later = snapshot(original), snapshot(original)
    publish(later, LAST + 1, LAST + 1)
    doomed = keys.blob(one_blob(later, LAST + 1))
    inner.put(doomed, later.get(doomed, limit=LIMIT))
    bucket = FaultyBucket(inner)
    bucket.postpone("delete", doomed)
    found = prune(RetryingBucket(bucket), read_run(inner), cutoff=LAST, grace_s=0)
    assert doomed in found.blobs
    assert bucket.operations.count(("delete", doomed)) == 2
    assert not inner.exists(doomed)
    now = [0.0]
    real = intents.store_clock
    monkeypatch.setattr(
        intents, "store_clock", lambda bucket: real(bucket) + timedelta(seconds=now[0])
    )

    def sleep(seconds):
        now[0] += 100.0
        if now[0] > intents.INTENT_S + intents.MARGIN_S - 200:
            bucket.deliver()  # As late as it can.

    monkeypatch.setattr(intents, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    publish(inner, LAST + 1, LAST + 1)
    bucket.deliver()
    assert_whole(inner, LAST + 1)


@pytest.mark.parametrize(
    ("verb", "key", "answer"),
    [
        ("list", keys.DELETION_INTENTS, lambda found: found[:-1]),
        ("head", f"{keys.DELETION_INTENTS}*", lambda found: None),
    ],
)
def test_one_bad_answer_about_an_intent_hides_it_from_no_writer(
    original, monkeypatch, verb, key, answer
):
    inner = snapshot(original)
    refs = read_blobs(inner, read_run(inner), read_manifest(inner, read_run(inner), LAST).delta)
    intent = left_behind(inner, [refs[0].hash])
    bucket = FaultyBucket(inner)
    bucket.replace(verb, key, answer=answer)
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        inner.delete(intent)

    monkeypatch.setattr(intents, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    assert intents.blobs_stay(bucket, read_run(inner), refs)
    assert waited, "the writer went on while the intent was there"


@pytest.mark.parametrize(
    ("url", "seconds"),
    [
        ("memory://", 300),
        ("s3://b/r", 1800),
        ("s3a://b/r", 1800),
        ("gs://b", 3600),
        ("az://b", 5400),
    ],
)
def test_how_long_an_unanswered_deletion_may_still_arrive(url, seconds):
    bucket = SimpleNamespace(url=url, local=url == "memory://")
    assert intents.margin_s(bucket) == seconds


def test_retention_sees_each_attempt_to_delete_below_any_layers(original):
    """Also where the bucket that repeats requests is wrapped by another one."""
    bucket = FaultyBucket(snapshot(original))
    bucket.fail("delete", f"{keys.BLOBS}*", at=1)
    prune(MeteredBucket(RetryingBucket(bucket)), read_run(bucket), cutoff=LAST, grace_s=0)
    assert bucket.inner.list(keys.DELETION_INTENTS), "an attempt got no answer"


def test_an_intent_goes_at_once_if_every_deletion_was_answered(original):
    bucket = FaultyBucket(snapshot(original))
    prune(RetryingBucket(bucket), read_run(bucket), cutoff=LAST, grace_s=0)
    assert not bucket.inner.list(keys.DELETION_INTENTS)


def test_an_intent_goes_if_what_is_needed_cannot_be_read(original, monkeypatch):
    """No deletion has begun, so no writer needs to wait."""
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)
    bucket = FaultyBucket(snapshot(original))
    before = bucket.list(keys.BLOBS)
    bucket.pause(
        "put",
        f"{keys.DELETION_INTENTS}*",
        wait=lambda: bucket.inner.put(keys.manifest(LAST + 1), b"junk"),
    )
    with pytest.raises(UnreadableError, match="so nothing more was deleted"):
        prune(RetryingBucket(bucket), read_run(bucket), cutoff=LAST, grace_s=0)
    assert bucket.list(keys.BLOBS) == before
    assert not bucket.inner.list(keys.DELETION_INTENTS)


def test_many_blobs_are_deleted_in_batches(original, monkeypatch):
    monkeypatch.setattr(intents, "MAX_INTENT_BLOBS", 2)
    bucket = FaultyBucket(snapshot(original))
    found = prune(RetryingBucket(bucket), read_run(bucket), cutoff=LAST, grace_s=0)
    assert len(found.blobs) == 3
    made = [
        key for verb, key in bucket.operations if verb == "put" and keys.DELETION_INTENTS in key
    ]
    assert len(set(made)) == len(made) == 2
    assert_whole(bucket.inner, LAST)
