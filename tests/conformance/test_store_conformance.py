"""The folder and memory buckets, and the faulty one at rest, keep what the wire needs."""

import pytest

from deltawire.store import open_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.store_suite import StoreSuite


class TestFolder(StoreSuite):
    @pytest.fixture
    def bucket(self, tmp_path):
        yield open_bucket(str(tmp_path / "bucket"), create=True)
        # Nothing that a test did has left the bucket, or left a staged upload behind in it.
        assert [path.name for path in tmp_path.iterdir()] == ["bucket"]
        assert not list((tmp_path / "bucket").rglob("*#*"))


class TestFolderUrl(StoreSuite):
    @pytest.fixture
    def bucket(self, tmp_path):
        folder = tmp_path / "with space and ü"
        folder.mkdir()
        return open_bucket(folder.as_uri())


class TestMemory(StoreSuite):
    @pytest.fixture
    def bucket(self):
        return open_bucket("memory://")


class TestFaultyAtRest(StoreSuite):
    @pytest.fixture
    def bucket(self):
        return FaultyBucket(open_bucket("memory://"))
