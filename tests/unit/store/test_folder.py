"""The folder bucket: obstacles, and leftovers of killed writers."""

import os
import time

import pytest

from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bucket
from deltawire.store.folder import ABANDONED_S


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_named_pipe_is_refused_at_once(tmp_path):
    bucket = open_bucket(str(tmp_path))
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe")
    with pytest.raises(CorruptError, match="not a regular file"):
        bucket.get("a/pipe", limit=10)
    with pytest.raises(CorruptError, match="not a regular file"):
        bucket.read_ranges("a/pipe", [(0, 1)])
    assert bucket.head("a/pipe") is None
    assert bucket.create("a/pipe", b"1") is False


def test_old_files_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("1#17", "1#18", "kept"):
        (tmp_path / "a" / name).write_bytes(b"half")
    old = time.time() - ABANDONED_S - 60
    os.utime(tmp_path / "a" / "1#17", (old, old))
    os.utime(tmp_path / "a" / "kept", (old, old))
    bucket = open_bucket(str(tmp_path))
    assert bucket.list("") == ["a/kept"]
    bucket.put("a/2", b"")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["1#18", "2", "kept"]


def test_a_temporary_name_is_no_key(tmp_path):
    bucket = open_bucket(str(tmp_path))
    for call in (lambda: bucket.put("a#1", b""), lambda: bucket.get("a#1", limit=1)):
        with pytest.raises(InputError, match="not a key"):
            call()


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, verb):
    bucket = open_bucket(str(tmp_path), durable=True)
    bucket.put("a/1", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="no space left"):
            getattr(bucket, verb)("a/2" if verb == "create" else "a/1", b"new")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]
    assert bucket.get("a/1", limit=9) == b"old"


@pytest.mark.parametrize("durable", [True, False])
def test_flushing_is_a_knob(tmp_path, monkeypatch, durable):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    monkeypatch.setenv("DELTAWIRE_DURABLE", "1" if durable else "0")
    bucket = open_bucket(str(tmp_path / "new"), create=True)
    bucket.create("a/b", b"1")
    assert bool(flushed) is durable


def test_a_folder_at_the_place_of_an_object_is_an_input_error(tmp_path):
    bucket = open_bucket(str(tmp_path))
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        bucket.put("a", b"1")
    with pytest.raises(InputError, match="too long"):
        bucket.put("x" * 300, b"1")
