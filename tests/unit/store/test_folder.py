"""The folder bucket: obstacles, and leftovers of killed writers."""

import os
import time

import pytest

from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bare_bucket, open_bucket
from deltawire.store.folder import ABANDONED_S, ignores_case


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


def test_names_that_differ_in_case_only_are_told_apart_or_refused(tmp_path):
    """Where the file system ignores case, one object would silently replace the other."""
    bucket = open_bare_bucket(str(tmp_path))
    assert not ignores_case(tmp_path)
    bucket.put("heartbeats/W0.json", b"big")
    bucket.put("heartbeats/w0.json", b"small")
    assert bucket.get("heartbeats/W0.json", limit=9) == b"big"
    bucket.delete("heartbeats/w0.json")
    bucket.ignores_case = True
    for call in (
        lambda: bucket.put("heartbeats/w0.json", b"1"),
        lambda: bucket.create("Heartbeats/W0.json", b"1"),
        lambda: bucket.get("heartbeats/w0.json", limit=9),
        lambda: bucket.head("heartbeats/w0.json"),
    ):
        with pytest.raises(InputError, match="differ in case only"):
            call()
    bucket.put("heartbeats/w1.json", b"1")
    assert bucket.get("heartbeats/W0.json", limit=9) == b"big"
    assert bucket.get("other/w0.json", limit=9) is None


def test_a_file_system_that_ignores_case_is_recognized(tmp_path):
    """There, a folder has a second name: its own in the other case. A link stands for that."""
    folder = tmp_path / "Bucket"
    folder.mkdir()
    assert not ignores_case(folder)
    (tmp_path / "bUCKET").symlink_to(folder)
    assert ignores_case(folder)
