"""Links in a folder bucket, and in a directory that is published, are no way to other files."""

import os

import pytest

from deltawire.errors import CorruptError, InputError
from deltawire.private_files import open_beneath
from deltawire.store import open_bucket
from deltawire.sync.publish.model_files import other_files


@pytest.fixture
def secret(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "secret.json").write_bytes(b"secret")
    return folder / "secret.json"


def test_links_in_a_folder_bucket_are_not_read(tmp_path, secret):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    bucket.put("a/real", b"real")
    folder = tmp_path / "bucket"
    (folder / "a" / "link").symlink_to(secret)
    (folder / "inside").symlink_to(folder / "a" / "real")
    (folder / "b").symlink_to(secret.parent, target_is_directory=True)
    for key in ("a/link", "inside", "b/secret.json"):
        with pytest.raises(CorruptError, match="a link in the bucket's folder"):
            bucket.get(key, limit=100)
        with pytest.raises(CorruptError, match="a link in the bucket's folder"):
            bucket.read_ranges(key, [(0, 2)])
        assert bucket.head(key) is None
        assert not bucket.is_listed(key)
    assert bucket.get("a/real", limit=100) == b"real"
    assert bucket.get("a/none", limit=100) is None
    assert bucket.get("a/real/none", limit=100) is None


def test_nothing_is_stored_through_a_link(tmp_path, secret):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    (tmp_path / "bucket" / "b").symlink_to(secret.parent, target_is_directory=True)
    for write in (bucket.put, bucket.create):
        with pytest.raises(CorruptError, match="a link in the bucket's folder"):
            write("b/new", b"x")
    assert [path.name for path in secret.parent.iterdir()] == ["secret.json"]
    (tmp_path / "bucket" / "c").symlink_to(secret)
    bucket.put("c", b"mine")  # The link is replaced, and its file left alone.
    assert secret.read_bytes() == b"secret"
    assert bucket.get("c", limit=100) == b"mine"


def test_the_buckets_folder_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    bucket = open_bucket(str(tmp_path / "link"))
    bucket.put("a/b", b"1")
    assert bucket.get("a/b", limit=10) == b"1"


def test_a_link_that_appears_meanwhile_is_not_followed(tmp_path, secret, monkeypatch):
    """Between the check of a name and its opening, another process puts a link in its place."""
    folder = tmp_path / "bucket"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "secret.json").write_bytes(b"harmless")
    opened = os.open

    def swapped(path, flags, mode=0o777, **where):
        if path == "a":
            (folder / "a").rename(folder / "was")
            (folder / "a").symlink_to(secret.parent, target_is_directory=True)
        return opened(path, flags, mode, **where)

    monkeypatch.setattr(os, "open", swapped)
    monkeypatch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, swapped})
    with pytest.raises(NotADirectoryError):
        open_beneath(folder, ("a", "secret.json"), os.O_RDONLY)


def test_a_published_directory_follows_no_link_out_of_it(tmp_path, secret):
    model = tmp_path / "model"
    (model / "notes").mkdir(parents=True)
    (model / "config.json").write_bytes(b"{}")
    (model / "notes" / "a.md").write_bytes(b"inside")
    (model / "README.md").symlink_to("notes/a.md")
    files, _ = other_files(model, [])
    assert files == {"README.md": b"inside", "config.json": b"{}"}
    (model / "NOTES.md").symlink_to(secret)
    with pytest.raises(InputError, match=r"NOTES\.md is a link to a file outside"):
        other_files(model, [])
    (model / "NOTES.md").unlink()
    (model / "out").symlink_to(secret.parent, target_is_directory=True)
    (model / "NOTES.md").symlink_to("out/secret.json")
    with pytest.raises(InputError, match="outside of its directory"):
        other_files(model, [])


def test_a_snapshot_of_the_hub_cache_is_published(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "0123").write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    assert other_files(snapshot, [])[0] == {"config.json": b"{}"}
