"""A tagged version outlives retention, whoever stops at any request of either."""

from contextlib import suppress
from functools import partial

import pytest

from deltawire.errors import CorruptError, DeltawireError, InputError, UnreadableError
from deltawire.store import RetryingBucket, open_bare_bucket, retrying
from deltawire.sync import load_mirror, prune, read_manifest
from deltawire.sync.chain import tags
from deltawire.sync.chain.tags import add_tag, read_tags, remove_tag, tagged_version
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import same_bits, start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.coordination import Tag
from deltawire.wire.seal import seal

NEWEST = 10


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)


@pytest.fixture(scope="module")
def original():
    bucket = open_bare_bucket("memory://")
    with start_publisher(bucket, anchor_every=4, compaction_strides=(2, 4)) as publisher:
        for version in range(NEWEST + 1):
            publisher.publish(weights(version))
    return {key: bucket.get(key, limit=1 << 20) for key in bucket.list("")}


@pytest.fixture
def fresh(original):
    def make():
        bucket = FaultyBucket(open_bare_bucket("memory://"))
        for key, data in original.items():
            bucket.inner.put(key, data)
        return bucket

    return make


def assert_readable(bucket, *versions):
    run = start_run(bucket.inner)
    for version in versions:
        found = load_mirror(bucket.inner, run, at=version)
        assert same_bits(found.tensors, weights(version))


def listed(bucket):
    return read_tags(bucket.inner, start_run(bucket.inner), so="nothing")


def test_a_tag_keeps_its_version_and_the_later_ones(fresh):
    bucket = fresh()
    run = start_run(bucket)
    tag = add_tag(bucket, run, 5, "best")
    assert add_tag(bucket, run, 5, "best") == tag
    with pytest.raises(InputError, match="version 5 has the tag best already"):
        add_tag(bucket, run, 6, "best")
    found = prune(bucket, run, cutoff=NEWEST, grace_s=0)
    assert (found.anchor, found.pruned_below, found.refused) == (4, 4, [])
    assert_readable(bucket, 4, 5, NEWEST)
    assert tagged_version(bucket, run, "best") == 5
    remove_tag(bucket, run, "best")
    assert prune(bucket, run, cutoff=NEWEST, grace_s=0).anchor == 8
    with pytest.raises(InputError, match="version 5 was deleted by retention"):
        add_tag(bucket, run, 5, "best")
    with pytest.raises(InputError, match="no tag best"):
        remove_tag(bucket, run, "best")


@pytest.mark.parametrize("name", ["7", "a/b", "..", "", "CON", "x" * 64])
def test_names_that_no_tag_has(fresh, name):
    bucket = fresh()
    before = bucket.inner.list("")
    with pytest.raises(InputError):
        add_tag(bucket, start_run(bucket), 5, name)
    assert bucket.inner.list("") == before


def test_a_version_that_is_not_committed_gets_no_tag(fresh):
    bucket = fresh()
    with pytest.raises(InputError, match="is not committed"):
        add_tag(bucket, start_run(bucket), NEWEST + 1, "best")
    assert not listed(bucket)


def race(bucket, other, *, at, act):
    """Runs ``act``, with ``other`` at its ``at``-th request; returns whether that came."""
    called = []

    def meanwhile():
        called.append(at)
        other()

    bucket.pause(at=at, wait=meanwhile)
    act()
    bucket.heal()
    return bool(called)


def tagged_anyway(bucket, run):
    try:
        add_tag(bucket, run, 5, "best")
    except InputError:
        return False
    return True


def tag_it(bucket, run, done):
    done.append(tagged_anyway(bucket, run))


def retain(bucket, run, _done):
    prune(bucket, run, cutoff=8, grace_s=0)


def at_every_request(fresh, act, other):
    """Runs ``act`` on fresh buckets, with ``other`` at each of its requests in turn; yields the
    bucket, its run, and whether the tag was set."""
    at = 0
    while True:
        at += 1
        bucket = fresh()
        run = start_run(bucket.inner)
        done = []
        meanwhile = partial(other, bucket.inner, run, done)
        if not race(bucket, meanwhile, at=at, act=partial(act, bucket, run, done)):
            return
        yield bucket, run, done[0]


def test_a_tag_at_every_request_of_retention_is_kept_or_refused(fresh):
    outcomes = []
    for bucket, _, done in at_every_request(fresh, retain, tag_it):
        outcomes.append(done)
        assert bool(listed(bucket)) == done
        assert_readable(bucket, 5 if done else 8)
    assert set(outcomes) == {True, False}
    assert len(outcomes) >= 40


def test_retention_at_every_request_of_a_tag(fresh):
    outcomes = set()
    for bucket, run, done in at_every_request(fresh, tag_it, retain):
        outcomes.add(done)
        prune(bucket, run, cutoff=8, grace_s=0)
        assert_readable(bucket, 5 if done else 8)
    assert outcomes == {True, False}


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_each_request_of_a_tag_fails(fresh, done):
    """The same call repairs what a crash leaves, which stops no retention for good."""
    at, ended = 0, False
    while not ended:
        at += 1
        bucket = fresh()
        run = start_run(bucket.inner)
        bucket.fail(at=at, times=None, done=done)
        with suppress(DeltawireError):
            add_tag(RetryingBucket(bucket), run, 5, "best")
            ended = len(bucket.operations) < at
        bucket.heal()
        kept = 4 if listed(bucket) else 8
        assert prune(bucket, run, cutoff=8, grace_s=0).pruned_below == kept
        assert_readable(bucket, kept, NEWEST)
        if kept == 4:
            add_tag(RetryingBucket(bucket), run, 5, "best")
    assert at > 3


def test_a_tag_that_came_too_late_does_not_stop_retention(fresh):
    """Its writer stopped before it looked at the floors."""
    bucket = fresh()
    run = start_run(bucket)
    prune(bucket, run, cutoff=4, grace_s=0)
    key = keys.tag("late")
    digest = read_manifest(bucket, run, 3).digest
    bucket.put(key, seal(Tag(run=run.id, version=3, digest=digest), key=key))
    found = prune(bucket, run, cutoff=8, grace_s=0)
    assert found.pruned_below == 8
    assert found.refused == ["the tag late names version 3, which retention has closed"]
    assert_readable(bucket, 8, NEWEST)


@pytest.mark.parametrize("junk", [b"", b"{}", "another run's"])
def test_a_tag_that_cannot_be_read_stops_retention(fresh, junk):
    bucket = fresh()
    run = start_run(bucket)
    key = keys.tag("best")
    if junk == "another run's":
        junk = seal(Tag(run="0" * 32, version=5, digest="0" * 32), key=key)
    bucket.put(key, junk)
    before = bucket.inner.list("")
    with pytest.raises(UnreadableError, match="so nothing was deleted"):
        prune(bucket, run, cutoff=8, grace_s=0)
    assert [one for one in bucket.inner.list("") if one != keys.CLOCK] == before
    bucket.put(keys.TAGS + "no tag.json", b"")
    bucket.delete(key)
    assert prune(bucket, run, cutoff=8, grace_s=0).pruned_below == 8


def test_a_tag_of_other_weights_is_not_followed(fresh):
    bucket = fresh()
    run = start_run(bucket)
    key = keys.tag("best")
    bucket.put(key, seal(Tag(run=run.id, version=5, digest="0" * 32), key=key))
    with pytest.raises(CorruptError, match="states other weights than version 5 has"):
        tagged_version(bucket, run, "best")


def test_without_the_look_at_the_floors_a_tag_is_lost(fresh, monkeypatch):
    """The adversary of the tests above: a tag that is reported and whose version is deleted."""
    bucket = fresh()
    run = start_run(bucket)
    prune(bucket, run, cutoff=8, grace_s=1000)
    monkeypatch.setattr(tags, "listed_twice", lambda *_: [])
    assert tagged_anyway(bucket, run)
    monkeypatch.undo()
    assert not tagged_anyway(bucket, run)
    assert not listed(bucket)
