"""The search for a late version: few requests, and never past the newest."""

import pytest

from deltawire.store import Bucket, open_bare_bucket
from deltawire.sync import newest_version
from deltawire.sync.chain.objects import FEW_VERSIONS, committed_objects, late_version
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys


class Numbers(Bucket):
    """Holds manifests of these versions, without storing them."""

    def __init__(self, versions):
        inner = open_bare_bucket("memory://")
        super().__init__(inner.store, inner.url, local=True)
        self.versions = versions
        self.requests = 0

    def exists(self, key):
        self.requests += 1
        return keys.trailing_number(key) in self.versions


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 1026, 4096, 4097, 99_999, 1_000_003])
def test_of_consecutive_versions_it_is_near_the_newest(count):
    bucket = Numbers(range(count))
    late = late_version(bucket)
    assert late == 0 or late in bucket.versions
    assert count - late <= FEW_VERSIONS + 1
    assert bucket.requests < 110


@pytest.mark.parametrize("hole", [range(1024, 1100), range(2000, 3000), range(4090, 4200)])
def test_with_numbers_missing_it_is_one_that_exists(hole):
    bucket = Numbers(set(range(10_000)) - set(hole))
    late = late_version(bucket)
    assert late == 0 or late in bucket.versions


def test_the_newest_version_is_found_with_holes_and_foreign_keys():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    for version in [*range(2000), 2100, 9_999_999_998]:
        bucket.inner.put(keys.manifest(version), b"x")
    assert newest_version(bucket) == max(committed_objects(bucket)) == 9_999_999_998
