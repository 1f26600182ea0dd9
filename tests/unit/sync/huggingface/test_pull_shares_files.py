"""`pull` writes what changed: reflinks where the file system has them, hard links, copies."""

import errno
import json
import mmap
import os
import shutil
from shutil import rmtree
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_dirs import files_in

from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync.huggingface import checkout as module
from deltawire.sync.huggingface import shared_files
from deltawire.sync.huggingface.checkout import Checkout
from deltawire.sync.huggingface.publish_dirs import CheckpointPublisher
from deltawire.sync.huggingface.shared_files import FileOrigin, clone, link

SIZE = 40 * mmap.PAGESIZE
FROZEN, MOVING = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(path, step):
    """A directory of two files, of which one never changes."""
    safetensors = pytest.importorskip("safetensors.numpy")
    path.mkdir()
    base = np.arange(SIZE // 2, dtype=np.int16)
    moving = base.copy()
    moving[:step] += 1
    safetensors.save_file({"frozen": base}, path / FROZEN)
    safetensors.save_file({"moving": moving}, path / MOVING)
    where = {"frozen": FROZEN, "moving": MOVING}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def published(tmp_path):
    bucket = open_bucket("memory://")
    paths = [write(tmp_path / f"c-{step}", step) for step in range(4)]
    with CheckpointPublisher(bucket, anchor_every=0) as series:
        for path in paths:
            series.publish(path)
        run = series.run
    return bucket, run, [files_in(path) for path in paths]


def no(*_):
    return False


def copied(source, target):
    shutil.copyfile(source, target)
    return True


def inode(folder, version, name):
    return (folder / ".out.deltawire" / f"{version:010d}" / name).stat().st_ino


def shown(folder, version):
    return files_in(folder / ".out.deltawire" / f"{version:010d}")


def test_a_file_that_no_delta_changes_is_linked(published, tmp_path, monkeypatch):
    bucket, run, wanted = published
    monkeypatch.setattr(module, "clone", no)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
        assert checkout.bytes_written >= 2 * SIZE
        checkout.bring_to(1)
        assert checkout.written[FileOrigin.LINKED] >= SIZE
        assert SIZE <= checkout.bytes_written < 1.1 * SIZE
        assert inode(tmp_path, 0, FROZEN) == inode(tmp_path, 1, FROZEN)
        assert inode(tmp_path, 0, MOVING) != inode(tmp_path, 1, MOVING)
        assert (shown(tmp_path, 0), shown(tmp_path, 1)) == (wanted[0], wanted[1])
        checkout.bring_to(3)
        assert checkout.verify()[0] == 3
    assert files_in(tmp_path / "out") == wanted[3]
    assert shown(tmp_path, 1) == wanted[1], "readers that opened the version before keep it"


def test_clones_take_the_changed_pages_only(published, tmp_path, monkeypatch):
    bucket, run, wanted = published
    monkeypatch.setattr(module, "clone", copied)  # A clone has the same bytes and its own inode.
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
        checkout.bring_to(2)
        assert checkout.written[FileOrigin.CLONED] >= 2 * SIZE
        assert checkout.written[FileOrigin.LINKED] == checkout.written[FileOrigin.COPIED] == 0
        assert 0 < checkout.bytes_written <= 2 * mmap.PAGESIZE
    assert (shown(tmp_path, 0), shown(tmp_path, 2)) == (wanted[0], wanted[2])


def test_clones_need_room_for_the_tensors_that_change(published, tmp_path, monkeypatch):
    """Pages of a clone take space when they are written, through mapped memory."""
    bucket, run, wanted = published
    monkeypatch.setattr(module, "clone", copied)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
        tight = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=SIZE - 1), rmtree=rmtree)
        monkeypatch.setattr(module, "shutil", tight)
        with pytest.raises(InputError, match=f"needs {SIZE} bytes"):
            checkout.bring_to(2)
        assert files_in(tmp_path / "out") == wanted[0]
        tight.disk_usage = lambda _: SimpleNamespace(free=SIZE)
        checkout.bring_to(2)
    assert files_in(tmp_path / "out") == wanted[2]


def test_without_clones_and_links_everything_is_copied(published, tmp_path, monkeypatch):
    bucket, run, wanted = published
    monkeypatch.setattr(module, "clone", no)
    monkeypatch.setattr(module, "link", no)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
        checkout.bring_to(2)
        assert checkout.bytes_written >= 2 * SIZE
    assert (shown(tmp_path, 0), shown(tmp_path, 2)) == (wanted[0], wanted[2])


def test_a_linked_file_that_changes_after_all_is_written_anew(published, tmp_path, monkeypatch):
    """As if damage had led the mirror another way than the one that was planned."""
    bucket, run, wanted = published
    monkeypatch.setattr(module, "clone", no)
    monkeypatch.setattr(Checkout, "_changed", lambda *_: set())
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
        checkout.bring_to(2)
        assert checkout.written[FileOrigin.LINKED] >= SIZE
        assert checkout.written[FileOrigin.COPIED] >= SIZE
        assert inode(tmp_path, 0, MOVING) != inode(tmp_path, 2, MOVING)
        assert checkout.verify()[0] == 2
    assert (shown(tmp_path, 0), shown(tmp_path, 2)) == (wanted[0], wanted[2])


@pytest.mark.parametrize("way", ["clone", "link"])
@pytest.mark.parametrize("name", [FROZEN, MOVING])
def test_a_damaged_version_is_not_shared(published, tmp_path, monkeypatch, way, name):
    bucket, run, wanted = published
    monkeypatch.setattr(module, "clone", copied if way == "clone" else no)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
    path = tmp_path / "out" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(2)
        assert checkout.verify()[0] == 2
    assert files_in(tmp_path / "out") == wanted[2]


def test_a_clone_that_the_file_system_refuses_leaves_nothing(tmp_path, monkeypatch):
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * 5000)
    for code in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY):

        def refuse(*_, code=code):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(shared_files, "_ficlone", refuse)
        assert not clone(source, target)
        assert not target.exists()

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shared_files, "_ficlone", full)
    with pytest.raises(OSError, match="full"):
        clone(source, target)


def test_a_clone_or_link_here_has_the_bytes(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * 5000)
    if clone(source, target):  # This machine's file system may have reflinks or not.
        target.write_bytes(b"y" + target.read_bytes()[1:])
        assert source.read_bytes() == b"x" * 5000
        target.unlink()
    assert link(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_ino == source.stat().st_ino
