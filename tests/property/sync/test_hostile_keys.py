"""Readers and writers of a run whose listings hold any keys end with the right bits, in a bounded
number of requests: loops run over keys that are listed, never over the numbers in them."""

from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.store import open_bare_bucket, retrying
from deltawire.store.bucket import ObjectMeta
from deltawire.sync import (
    ManifestFollower,
    Relay,
    Subscriber,
    load_mirror,
    newest_version,
    open_publisher,
    prune,
    read_run,
)
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import TENSORS, same_bits, weights
from deltawire.wire import keys

LAST = 6
MOST_REQUESTS = 600
"""A loop over a number of ten digits would need more; what is listed needs less."""

NUMBERS = st.one_of(
    st.integers(0, 10**40).map(str),
    st.integers(10**9, 10**10 - 1).map(str),
    st.integers(0, 2 * LAST).map(lambda number: f"{number:010d}"),
    st.integers(0, 10**10 - 1).map(lambda number: f"{number:020d}"),
    st.sampled_from(["9999999999", "0000000000", "-000000001", "٠٠٠٠٠٠٠٠٠٤", "1e9", "0x00000004"]),
)
WORDS = st.one_of(NUMBERS, st.sampled_from(["", "..", ".", "anchor", "é", "\U0001f4a5", "a" * 900]))
KEYS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(
            [
                *(keys.MANIFESTS, keys.COMPACTED, keys.RETENTION_FLOORS, keys.DELETION_INTENTS),
                *(keys.PARTS, keys.BLOBS, keys.CHECKPOINTS, "weights//manifests/", "../", ""),
            ]
        ),
        WORDS,
        st.sampled_from(["", "-", "/", "//", "-~"]),
        WORDS,
        st.sampled_from(["", ".json", "/commit.json", ".json.json", "/"]),
    ),
)


class CrowdedBucket(FaultyBucket):
    """A bucket whose listings hold further keys, of which there are no objects.

    No store of ours lists a key that it cannot read: `Bucket.list_objects` raises for those.
    """

    def __init__(self, inner, crowd):
        super().__init__(inner)
        self.crowd = {key for key in crowd if could_hold(inner, key)}

    def list_objects(self, prefix, *, after=None):
        there = super().list_objects(prefix, after=after)
        now = datetime(2026, 11, 22, tzinfo=UTC)
        more = [
            ObjectMeta(key, 3, now)
            for key in self.crowd
            if key.startswith(prefix) and (after is None or key > after)
        ]
        return sorted([*there, *more], key=lambda entry: entry.key)


def could_hold(bucket, key):
    """Returns whether a store can have an object of this key, and has none."""
    try:
        return bool(key) and not bucket.exists(key)
    except InputError:
        return False


@pytest.fixture(scope="module")
def whole():
    bucket = open_bare_bucket("memory://")
    publisher = open_publisher(
        bucket, weights(0), specs=TENSORS, anchor_every=3, compaction_strides=(2,)
    )
    for version in range(1, LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(crowd=st.sets(KEYS, max_size=12))
def test_listed_keys_steer_nobody(whole, monkeypatch, crowd):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    copy = open_bare_bucket("memory://")
    for key in whole.list(""):
        copy.put(key, whole.get(key, limit=1 << 26))
    bucket = CrowdedBucket(copy, crowd)
    run = read_run(bucket)

    mirror = load_mirror(bucket, run)
    assert (mirror.version, same_bits(mirror.tensors, weights(LAST))) == (LAST, True)
    late = Subscriber(bucket, run, load_mirror(whole, run, at=0))
    late.advance()
    assert (late.mirror.version, same_bits(late.mirror.tensors, weights(LAST))) == (LAST, True)
    steps = ManifestFollower(bucket, run)
    while (update := steps.prepare()) is not None:
        steps.commit(update)
    assert steps.version == LAST
    check_run(bucket)

    destination = open_bare_bucket("memory://")
    relay = Relay(bucket, destination, grace_s=0)
    relay.advance()
    relay.close()
    assert relay.version == LAST

    prune(bucket, run, cutoff=3, grace_s=0)
    after = load_mirror(bucket, run)
    assert (after.version, same_bits(after.tensors, weights(LAST))) == (LAST, True)
    publisher = open_publisher(bucket, weights(0), specs=TENSORS, compaction_strides=())
    assert publisher.publish(weights(LAST + 1)) > LAST
    publisher.close()
    assert newest_version(copy) > LAST
    assert len(bucket.operations) < MOST_REQUESTS
