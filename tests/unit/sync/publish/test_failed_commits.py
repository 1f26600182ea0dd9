"""A commit that failed is told to a caller that does not publish another version."""

import time
from contextlib import closing

import pytest

from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import read_manifest
from deltawire.testing import tiny
from deltawire.wire import keys


def wait_for_failure(publisher):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        publisher.raise_failure()
        time.sleep(0.01)


def test_the_error_of_a_commit_is_raised_without_another_version():
    bucket = open_bucket("memory://")
    run = tiny.start_run(bucket)
    with closing(tiny.start_publisher(bucket)) as publisher:
        publisher.publish(tiny.weights(0))
        publisher.flush()
        publisher.raise_failure()  # There is none.
        bucket.put(keys.manifest(1), b"somebody's object")
        publisher.publish(tiny.weights(1))
        with pytest.raises(InputError, match="unreadable object has this version's name"):
            wait_for_failure(publisher)
        publisher.publish(tiny.weights(1))
        publisher.flush()
        assert publisher.version == 2
        publisher.raise_failure()
    assert read_manifest(bucket, run, 2).base == 0
