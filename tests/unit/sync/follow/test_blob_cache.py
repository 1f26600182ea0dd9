"""Readers of one host fetch each blob of a delta once, whatever becomes of the others."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from blake3 import blake3

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import open_bare_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import Subscriber, load_mirror
from deltawire.sync.chain.objects import read_manifest
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.follow import blob_cache
from deltawire.sync.follow.blob_cache import BlobCache, configured_cache
from deltawire.testing import tiny
from deltawire.wire import keys
from deltawire.wire.payload import BlobRef

READERS = 8


class Remote(DelegatingBucket):
    """A bucket that is not on this host; ``reads`` counts the requests for each object, and
    ``read_bytes`` what blobs they brought."""

    def __init__(self, inner):
        super().__init__(inner)
        self.local = False
        self.reads = {}
        self.read_bytes = 0
        self._counting = threading.Lock()

    def _call(self, verb, key, operation):
        if verb in ("get", "range"):
            with self._counting:
                self.reads[key] = self.reads.get(key, 0) + 1
        found = operation()
        if verb in ("get", "range") and key.startswith("weights/blobs/"):
            with self._counting:
                self.read_bytes += len(found) if verb == "get" else sum(map(len, found))
        return found


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The folder that the environment names."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(blob_cache.FOLDER, str(folder))
    return folder


@pytest.fixture
def published():
    """A bucket with version 0 of a run whose deltas have several blobs, the run, its publisher."""
    inner = open_bare_bucket("memory://")
    run = tiny.start_run(inner)
    with closing(tiny.start_publisher(inner, blob_bytes=64)) as publisher:
        publish(publisher, 0)
        yield inner, run, publisher


def publish(publisher, version):
    publisher.publish(tiny.weights(version))
    publisher.flush()


def blobs_of(bucket, run, version):
    manifest = read_manifest(bucket, run, version)
    return read_blobs(bucket, run, manifest.delta)


def holds(mirror, version):
    return all(
        np.array_equal(mirror.tensors[name], bits.reshape(-1))
        for name, bits in tiny.weights(version).items()
    )


def one_blob(size=1000):
    data = np.random.default_rng(0).bytes(size)
    ref = BlobRef(blake3(data).hexdigest(), size)
    bucket = Remote(open_bare_bucket("memory://"))
    bucket.put(keys.blob(ref.hash), data)
    return bucket, ref, data


def test_the_readers_of_a_host_fetch_each_blob_once(shared, published):
    inner, run, publisher = published
    bucket = Remote(inner)
    readers = [Subscriber(bucket, run, load_mirror(inner, run)) for _ in range(READERS)]
    for version in range(1, 6):
        publish(publisher, version)
        with ThreadPoolExecutor(READERS) as pool:
            assert all(pool.map(Subscriber.advance, readers))
        names = [keys.blob(ref.hash) for ref in blobs_of(inner, run, version)]
        assert len(names) > 3
        assert [bucket.reads[name] for name in names] == [1] * len(names)
        assert all(holds(reader.mirror, version) for reader in readers)
    assert not [*shared.glob("*.part")]


def test_without_a_folder_each_reader_fetches_its_own(published, monkeypatch):
    monkeypatch.delenv(blob_cache.FOLDER, raising=False)
    inner, run, publisher = published
    bucket = Remote(inner)
    readers = [Subscriber(bucket, run, load_mirror(inner, run)) for _ in range(2)]
    publish(publisher, 1)
    for reader in readers:
        reader.advance()
    assert {bucket.reads[keys.blob(ref.hash)] for ref in blobs_of(inner, run, 1)} == {2}


def test_a_folder_on_this_host_needs_no_cache(shared, tmp_path):
    bucket = open_bare_bucket(tmp_path / "run", create=True)
    assert configured_cache(bucket) is None
    assert not shared.exists()


def test_ranks_that_serve_parts_of_a_tensor_fetch_together_what_one_would(shared, published):
    inner, run, publisher = published
    # Each serves a few rows of two tensors, and all of the others, as ranks that serve columns do.
    wanted = {spec.name: None for spec in run.tensors}
    parts = [
        {**wanted, "embed.weight": (6 * rank, 6 * rank + 6), "norm": (4 * rank, 4 * rank + 4)}
        for rank in range(4)
    ]
    bucket = Remote(inner)
    readers = [Subscriber(bucket, run, load_mirror(inner, run, wanted=part)) for part in parts]
    publish(publisher, 1)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(Subscriber.advance, readers))
    assert bucket.read_bytes == sum(ref.bytes for ref in blobs_of(inner, run, 1))


def test_a_reader_that_lags_fetches_ahead_into_the_cache(shared, published):
    inner, run, publisher = published
    bucket = Remote(inner)
    readers = [Subscriber(bucket, run, load_mirror(inner, run), stepwise=True) for _ in range(3)]
    for version in range(1, 5):
        publish(publisher, version)
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(Subscriber.advance, readers))
    assert all(holds(reader.mirror, 4) for reader in readers)
    for version in range(1, 5):
        reads = [bucket.reads[keys.blob(ref.hash)] for ref in blobs_of(inner, run, version)]
        assert reads == [1] * len(reads)


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty"])
def test_a_damaged_file_costs_its_bytes_once_more(shared, published, damage):
    inner, run, publisher = published
    bucket = Remote(inner)
    first, second = (Subscriber(bucket, run, load_mirror(inner, run)) for _ in range(2))
    publish(publisher, 1)
    first.advance()
    for ref in blobs_of(inner, run, 1):
        path = shared / ref.hash
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[0] ^= 1
        path.write_bytes(
            {"flipped": data, "short": data[:-1], "long": data + b"x", "empty": b""}[damage]
        )
    assert second.advance()
    assert holds(second.mirror, 1)


def test_a_blob_that_is_damaged_in_the_bucket_is_named_and_not_kept(shared, published):
    inner, run, publisher = published
    bucket = Remote(inner)
    reader = Subscriber(bucket, run, load_mirror(inner, run))
    publish(publisher, 1)
    (name, *_) = [keys.blob(ref.hash) for ref in blobs_of(inner, run, 1)]
    data = bytearray(inner.get(name, limit=1 << 20))
    data[0] ^= 1
    inner.put(name, bytes(data))
    with pytest.raises(CorruptError) as caught:
        reader.advance()
    assert caught.value.key == name
    assert not (shared / name.rsplit("/", 1)[-1]).exists()


def test_a_store_that_does_not_answer_leaves_no_claim(shared):
    bucket, ref, data = one_blob()

    class Silent(Remote):
        def _call(self, verb, key, operation):
            raise RetryError("no answer")

    with pytest.raises(RetryError):
        BlobCache(Silent(bucket), shared).read(ref, [(0, 10)])
    assert BlobCache(bucket, shared).get(ref) == data


def test_a_reader_that_was_killed_holds_nobody_up(shared):
    bucket, ref, data = one_blob()
    BlobCache(bucket, shared)
    code = (
        "import fcntl, os, sys, time\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "os.write(file, b'half')\n"
        "print('locked', flush=True)\n"
        "time.sleep(600)\n"
    )
    path = shared / f"{ref.hash}.part"
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(BlobCache(bucket, shared).get, ref)
            holder.send_signal(signal.SIGKILL)
            assert waiting.result(60) == data
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert [path.name for path in shared.iterdir()] == [ref.hash]


def test_a_fetch_that_never_ends_is_not_awaited_forever(shared, monkeypatch):
    bucket, ref, _ = one_blob()
    monkeypatch.setattr(blob_cache, "WAIT_S", 0.0)
    entered, leave = threading.Event(), threading.Event()

    class Slow(Remote):
        def _call(self, verb, key, operation):
            entered.set()
            assert leave.wait(60)
            return operation()

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(BlobCache(Slow(bucket), shared).get, ref)
        assert entered.wait(60)
        assert BlobCache(bucket, shared).read(ref, [(0, 10)]) is None
        leave.set()
        slow.result(60)


def test_a_reader_that_was_stopped_is_not_awaited_blob_by_blob(shared, monkeypatch):
    """Its claims are older than a reader waits, so none costs a pause; a new claim does."""
    bucket, ref, data = one_blob()
    cache, pauses = BlobCache(bucket, shared), []
    path = shared / f"{ref.hash}.part"
    with path.open("wb") as held:
        path.chmod(0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        os.utime(path, (0, 0))
        monkeypatch.setattr(blob_cache.time, "sleep", lambda _s: pytest.fail("it waited"))
        assert cache.read(ref, [(0, 10)]) is None
        os.utime(path)

        def end_the_claim(_seconds):
            pauses.append(1)
            fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(blob_cache.time, "sleep", end_the_claim)
        assert cache.read(ref, [(0, 10)]) == [data[:10]]
    assert pauses == [1]


@pytest.mark.parametrize("refused_s", [1.0, float("inf")])
def test_a_slow_fetch_is_awaited_while_the_store_refuses(shared, monkeypatch, refused_s):
    """Otherwise each reader of the host would add its own request for every blob."""
    bucket, ref, data = one_blob()
    monkeypatch.setattr(blob_cache, "TOUCH_S", 0.01)
    monkeypatch.setattr(blob_cache, "FETCH_S", 0.05)
    monkeypatch.setattr(blob_cache, "refused_ago_s", lambda _url: refused_s - 0.96)
    entered, leave = threading.Event(), threading.Event()

    class Slow(Remote):
        def _call(self, verb, key, operation):
            entered.set()
            assert leave.wait(60)
            return operation()

    path = shared / f"{ref.hash}.part"
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(BlobCache(Slow(bucket), shared).get, ref)
        assert entered.wait(60)
        time.sleep(0.2)  # Longer than a fetch is touched.
        os.utime(path, (0, 0))
        deadline = time.monotonic() + (60 if refused_s == 1.0 else 0.2)
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (path.stat().st_mtime > 0) is (refused_s == 1.0)
        other = BlobCache(bucket, shared)
        waiting = pool.submit(other.read, ref, [(0, 10)])
        if refused_s != 1.0:
            assert waiting.result(60) is None
        leave.set()
        assert slow.result(60) == data
        if refused_s == 1.0:
            assert waiting.result(60) == [data[:10]]
            assert other.fetched_bytes == 0


def test_a_claim_is_dated_when_it_begins(shared):
    """A dead reader's file may be an hour old."""
    bucket, ref, _ = one_blob()
    path = shared / f"{ref.hash}.part"
    ages = []

    class Looking(Remote):
        def _call(self, verb, key, operation):
            ages.append(path.stat().st_mtime)
            return operation()

    cache = BlobCache(Looking(bucket), shared)
    path.touch(mode=0o600)
    os.utime(path, (0, 0))
    cache.get(ref)
    assert ages[0] > 0


def test_a_range_that_the_system_reads_in_pieces_is_whole(shared, monkeypatch):
    bucket, ref, data = one_blob()
    cache, read = BlobCache(bucket, shared), os.pread
    assert cache.get(ref) == data
    monkeypatch.setattr(os, "pread", lambda file, length, at: read(file, min(length, 64), at))
    assert cache.read(ref, [(0, 10), (5, 900)]) == [data[:10], data[5:905]]
    assert cache.get(ref) == data
    assert bucket.reads == {keys.blob(ref.hash): 1}
    assert cache._read_file(ref, [(990, 20)]) is None, "the file ends before"


def test_a_folder_of_another_user_is_no_wrong_input(shared, monkeypatch, caplog):
    bucket, _, _ = one_blob()
    shared.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: shared.stat().st_uid + 1)
    assert configured_cache(bucket) is None
    assert "belongs to another user" in caplog.text


def test_without_space_readers_fetch_for_themselves(shared):
    bucket, ref, data = one_blob()

    class Full(BlobCache):
        def _make_room(self, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for count in (1, 2):
        assert Full(bucket, shared).get(ref) == data
        assert bucket.reads[keys.blob(ref.hash)] == count
    assert not [*shared.iterdir()]


def test_the_oldest_blobs_are_deleted_and_large_versions_are_not_kept(shared):
    bucket = Remote(open_bare_bucket("memory://"))
    cache = BlobCache(bucket, shared, limit_bytes=2500)
    refs = []
    for number in range(5):
        data = bytes([number]) * 1000
        refs.append(BlobRef(blake3(data).hexdigest(), 1000))
        bucket.put(keys.blob(refs[-1].hash), data)
        cache.get(refs[-1])
        os.utime(shared / refs[-1].hash, ns=(number, number))
    assert {path.name for path in shared.iterdir()} == {ref.hash for ref in refs[-2:]}
    assert cache.takes(1250)
    assert not cache.takes(1251)
    assert (cache.fetched_bytes, cache.shared_bytes) == (5000, 0)
    cache.read(refs[-1], [(0, 10), (990, 10)])
    assert (cache.fetched_bytes, cache.shared_bytes) == (5000, 20)


def test_unfinished_files_of_dead_readers_are_deleted_in_time(shared):
    bucket, ref, _ = one_blob()
    cache = BlobCache(bucket, shared)
    old, new = shared / f"{'a' * 64}.part", shared / f"{'b' * 64}.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.get(ref)
    assert not old.exists()
    assert new.exists()


def test_files_that_are_no_blobs_are_left_alone(shared):
    bucket, ref, _ = one_blob()
    cache = BlobCache(bucket, shared, limit_bytes=ref.bytes)
    notes, folder = shared / "notes.txt", shared / ("c" * 64)
    part, link = shared / "thesis.part", shared / ("d" * 64)
    for path in (notes, part):
        path.write_bytes(b"x" * 5000)
        os.utime(path, (0, 0))
    folder.mkdir()
    link.symlink_to(notes)
    cache.get(ref)
    assert notes.exists()
    assert part.exists()
    assert folder.is_dir()
    assert link.is_symlink()
    assert (shared / ref.hash).exists()


def test_a_file_of_another_kind_in_its_place_is_not_followed(shared, tmp_path):
    bucket, ref, data = one_blob()
    cache = BlobCache(bucket, shared)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * ref.bytes)
    (shared / ref.hash).symlink_to(secret)
    (shared / f"{ref.hash}.part").symlink_to(secret)
    assert cache.get(ref) == data
    assert secret.read_bytes() == b"x" * ref.bytes


@pytest.mark.parametrize("stated", ["nonsense", "-1", "0", "nan", "inf", "1e300"])
def test_a_limit_that_is_no_size_is_refused(shared, monkeypatch, stated):
    monkeypatch.setenv(blob_cache.GIGABYTES, stated)
    with pytest.raises(InputError, match=blob_cache.GIGABYTES):
        configured_cache(Remote(open_bare_bucket("memory://")))


def test_a_folder_that_cannot_be_trusted_is_refused(tmp_path, monkeypatch):
    bucket = Remote(open_bare_bucket("memory://"))
    monkeypatch.setenv(blob_cache.FOLDER, "cache")
    with pytest.raises(InputError, match="absolute"):
        configured_cache(bucket)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setenv(blob_cache.FOLDER, str(link))
    with pytest.raises(InputError, match="not a folder, or a link"):
        configured_cache(bucket)
    shared = tmp_path / "open"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv(blob_cache.FOLDER, str(shared))
    with pytest.raises(InputError, match="other users may write"):
        configured_cache(bucket)
