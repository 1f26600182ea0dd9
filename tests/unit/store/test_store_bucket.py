"""Opening buckets, and the translation of a store's errors."""

import os
import socket

import pytest

from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.store import Bucket, MeteredBucket, RetryingBucket, open_bare_bucket
from deltawire.store.delegating import DelegatingBucket

as_root = hasattr(os, "geteuid") and os.geteuid() == 0


def test_missing_folder(tmp_path):
    with pytest.raises(InputError, match="there is no bucket"):
        open_bare_bucket(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_create_makes_the_folder_or_opens_it(tmp_path):
    open_bare_bucket(str(tmp_path / "a" / "b"), create=True).put("k", b"1")
    assert open_bare_bucket(str(tmp_path / "a" / "b"), create=True).get("k", limit=1) == b"1"


def test_folder_and_url_are_one_bucket(tmp_path):
    folder = tmp_path / "ä b%20#?"
    bucket = open_bare_bucket(str(folder), create=True)
    bucket.put("k", b"1")
    assert open_bare_bucket(bucket.url).get("k", limit=1) == b"1"


@pytest.mark.parametrize("location", ["ftp://host/x", "file://host/x", "s4://bucket"])
def test_refused_locations(location):
    with pytest.raises(InputError) as caught:
        open_bare_bucket(location)
    assert location in str(caught.value)


def test_a_file_is_not_a_bucket(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for create in (False, True):
        with pytest.raises(InputError):
            open_bare_bucket(str(tmp_path / "file"), create=create)


def test_memory_buckets_are_separate():
    open_bare_bucket("memory://").put("k", b"1")
    assert open_bare_bucket("memory://").get("k", limit=1) is None


def test_a_file_in_place_of_a_folder_is_an_input_error(tmp_path):
    bucket = open_bare_bucket(str(tmp_path))
    (tmp_path / "rollouts").write_bytes(b"")
    with pytest.raises(InputError, match="not a directory") as caught:
        bucket.put("rollouts/w/0", b"1")
    assert caught.value.key == "rollouts/w/0"
    assert caught.value.run == bucket.url


@pytest.mark.skipif(as_root, reason="root may write anywhere")
def test_a_folder_without_permission_is_an_input_error(tmp_path):
    bucket = open_bare_bucket(str(tmp_path))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="permission denied"):
            bucket.create("k", b"1")
    finally:
        tmp_path.chmod(0o700)


def test_a_store_that_does_not_answer_is_a_retry_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # The port is closed again: every connection is refused.
    from obstore.store import S3Store

    store = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id="a",
        secret_access_key="b",
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    bucket = Bucket(store, "s3://bucket", local=False)
    calls = [
        lambda: bucket.get("k", limit=1),
        lambda: bucket.put("k", b""),
        lambda: bucket.create("k", b""),
        lambda: bucket.exists("k"),
        lambda: bucket.list("k"),
        lambda: bucket.delete("k"),
    ]
    for call in calls:
        with pytest.raises(DeltawireError) as caught:
            call()
        assert type(caught.value) is RetryError
        assert "s3://bucket" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_remote_bucket_is_polled_less_often(tmp_path):
    assert open_bare_bucket(str(tmp_path)).poll_s < Bucket(None, "s3://b", local=False).poll_s


def test_a_wrapper_is_polled_as_often_as_the_bucket_in_it():
    class Slow(DelegatingBucket):
        poll_s = 7.0

    bucket = MeteredBucket(Slow(open_bare_bucket("memory://")))
    assert bucket.poll_s == 7.0
    assert RetryingBucket.over(bucket).poll_s == 7.0
