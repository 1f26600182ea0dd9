"""Folder, memory, S3, the faulty bucket and the proxy without faults pass the store suite.

S3 is tested over HTTP with three implementations of it.
"""

import threading

import pytest

from deltawire.store import Bucket, open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.store_suite import StoreSuite


class TestFolder(StoreSuite):
    @pytest.fixture
    def bucket(self, tmp_path):
        yield open_bare_bucket(str(tmp_path / "bucket"), create=True)
        # No test wrote outside the bucket or left a temporary file in it.
        assert [path.name for path in tmp_path.iterdir()] == ["bucket"]
        assert not list((tmp_path / "bucket").rglob("*#*"))


class TestFolderUrl(StoreSuite):
    @pytest.fixture
    def bucket(self, tmp_path):
        folder = tmp_path / "with space and ü"
        folder.mkdir()
        return open_bare_bucket(folder.as_uri())


class TestMemory(StoreSuite):
    @pytest.fixture
    def bucket(self):
        return open_bare_bucket("memory://")


class TestFaultyAtRest(StoreSuite):
    @pytest.fixture
    def bucket(self):
        return FaultyBucket(open_bare_bucket("memory://"))


class TestS3(StoreSuite):
    @pytest.fixture
    def bucket(self, new_bucket):
        return new_bucket("s3")


class TestS3AnotherImplementation(StoreSuite):
    @pytest.fixture
    def bucket(self, new_bucket):
        return new_bucket("moto")


@pytest.mark.drills
class TestS3OnADisk(StoreSuite):
    @pytest.fixture
    def bucket(self, new_bucket):
        return new_bucket("disk")


class TestS3BehindTheProxyAtRest(StoreSuite):
    @pytest.fixture
    def bucket(self, s3_server, request):
        with FaultyProxy(s3_server.endpoint) as proxy:
            url = f"s3://drills/proxy-at-rest/{request.node.name}"
            yield s3_server.open_bare(url, endpoint=proxy.endpoint)


class LooksBeforeItWrites(Bucket):
    """A store whose create is two steps: all writers look before any of them writes."""

    def __init__(self, writers):
        inner = open_bare_bucket("memory://")
        super().__init__(inner.store, inner.url, local=True)
        self.all_have_looked = threading.Barrier(writers)

    def create(self, key, data):
        there = self.exists(key)
        self.all_have_looked.wait(timeout=120)
        if there:
            return False
        self.put(key, data)
        return True


def test_a_create_in_two_steps_is_noticed():
    """Such a server (moto without the lock around it) does not pass the suite."""
    with pytest.raises(AssertionError):
        StoreSuite().test_create_race_has_one_winner(LooksBeforeItWrites(writers=6))
