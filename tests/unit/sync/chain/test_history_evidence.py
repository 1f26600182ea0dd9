"""The history of versions: complete, or an error that names the version that may be missing."""

import pytest

from deltawire.errors import CorruptError, UnreadableError
from deltawire.live.erasure.rebuilding import _ancestry
from deltawire.store import open_bare_bucket
from deltawire.sync import newest_readable, read_history, read_run
from deltawire.sync.chain.history import is_skipped
from deltawire.testing.faulty import FaultyBucket, flip_bit, half
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys

NEWEST = 5


def publish(bucket, last):
    publisher = start_publisher(bucket, anchor_every=3)
    for version in range(publisher.version + 1, last + 1):
        if version >= publisher.next_version:
            publisher.publish(weights(version))
            publisher.flush()
    publisher.close()


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)
    found = FaultyBucket(open_bare_bucket("memory://"))
    publish(found.inner, NEWEST)
    return found


def versions(bucket, **options):
    return [one.version for one in read_history(bucket, read_run(bucket.inner), **options)]


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("damage", [half, lambda data: flip_bit(data, 99), lambda data: b""])
def test_damaged_answers_drop_no_version(bucket, readers, times, damage):
    for version in (2, NEWEST):
        bucket.damage(keys.manifest(version), damage, times=times)
    assert versions(bucket, readers=readers) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("version", [3, NEWEST])
def test_a_version_that_stays_unreadable_is_an_error_also_if_it_is_the_newest(bucket, version):
    bucket.damage(keys.manifest(version), half)
    with pytest.raises(UnreadableError, match="so nothing was decided") as caught:
        versions(bucket)
    assert caught.value.key == keys.manifest(version)
    assert versions(bucket, to=2) == [1, 2]


def test_a_caller_that_asks_again_may_go_without_the_newest(bucket):
    bucket.damage(keys.manifest(NEWEST), half)
    assert versions(bucket, complete=False) == [1, 2, 3, 4]


def test_a_version_that_is_not_found_once_is_there(bucket):
    bucket.replace("get", keys.manifest(NEWEST), answer=lambda _: None)
    assert versions(bucket) == [1, 2, 3, 4, 5]


def test_a_short_listing_leaves_nothing_out(bucket):
    bucket.replace("list", keys.MANIFESTS, answer=lambda found: found[:-2])
    assert versions(bucket) == [1, 2, 3, 4, 5]


def test_a_missing_base_is_an_error_that_names_it(bucket):
    bucket.inner.delete(keys.manifest(3))
    with pytest.raises(CorruptError, match="a manifest is missing: version 4 builds on it"):
        versions(bucket)


def test_a_number_that_belongs_to_no_version_is_skipped(bucket):
    bucket.inner.put(keys.manifest(NEWEST + 1), b"junk")
    assert not is_skipped(bucket, read_run(bucket.inner), NEWEST + 1)  # Nobody says so yet.
    publish(bucket.inner, NEWEST + 2)
    assert is_skipped(bucket, read_run(bucket.inner), NEWEST + 1)
    assert not is_skipped(bucket, read_run(bucket.inner), NEWEST)
    assert versions(bucket) == [1, 2, 3, 4, 5, 7]


def test_sound_versions_are_read_once(bucket):
    del bucket.operations[:]
    list(read_history(bucket, run := read_run(bucket.inner)))
    gets = [key for verb, key in bucket.operations if verb == "get"]
    assert gets == [keys.manifest(version) for version in range(1, NEWEST + 1)]
    del bucket.operations[:]
    newest_readable(bucket, run)
    assert [verb for verb, _ in bucket.operations].count("get") == 1


def test_a_rebuild_is_not_called_needless_on_a_damaged_answer(bucket):
    """The newest version was trained on the user: dropping it once said that nothing was left."""
    run = read_run(bucket.inner)
    bucket.damage(keys.manifest(NEWEST), half, times=2)
    assert _ancestry(bucket, run, [NEWEST]).clean[NEWEST] == NEWEST - 1
    bucket.damage(keys.manifest(NEWEST), half)
    with pytest.raises(UnreadableError, match="so nothing was decided"):
        _ancestry(bucket, run, [NEWEST])
