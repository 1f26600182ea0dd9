"""Wrong input is refused by name, costs no memory, and loses nothing that was there."""

import itertools
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from deltawire import codec
from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bucket
from deltawire.sync import (
    Mirror,
    Publisher,
    Subscriber,
    create_run,
    find_run,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.testing.tiny import same_bits, start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.seal import seal_json


@pytest.fixture(params=["folder", "memory", "s3"])
def bucket(request, new_bucket):
    """A run of versions 0 and 1."""
    bucket = new_bucket(request.param)
    publisher = start_publisher(bucket)
    for version in range(2):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


def one_line(error):
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1000
    return text


def assert_nothing_lost(bucket, newest=1):
    assert newest_version(bucket) == newest
    run = read_run(bucket)
    for version in range(newest + 1):
        assert same_bits(load_mirror(bucket, run, at=version).tensors, weights(version))
    publisher = start_publisher(bucket)
    assert publisher.publish(weights(newest + 1)) == newest + 1
    publisher.close()
    assert same_bits(load_mirror(bucket, run).tensors, weights(newest + 1))


NAMES = ["../out", "/etc/passwd", "a/../../out", "C:\\out", "nul\0l", "new\nline", "..", "x" * 1024]


def test_names_are_labels_and_never_paths(tmp_path):
    """A tensor may be called anything; nothing in the bucket is."""
    bits = np.arange(6, dtype=np.uint16)
    tensors = {name: bits + number for number, name in enumerate(NAMES)}
    specs = [TensorSpec(name, (6,), "BF16") for name in NAMES]
    digest = codec.digest_model(tensors).hex()
    folder = tmp_path / "a" / "b" / "bucket"
    bucket = open_bucket(str(folder), create=True)
    run = create_run(
        bucket, Run(id="ab" * 16, name="r", created_at=0.0, tensors=specs, digest=digest)
    )
    blank = Mirror({name: np.zeros(6, np.uint16) for name in NAMES}, -1, codec.ZERO)
    publisher = Publisher(bucket, run, blank, epoch=0)
    publisher.publish(tensors)
    later = {name: array ^ 1 for name, array in tensors.items()}
    publisher.publish(later)
    publisher.close()
    assert same_bits(load_mirror(bucket, read_run(bucket), at=0).tensors, tensors)
    assert same_bits(load_mirror(bucket, read_run(bucket)).tensors, later)
    everything = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert everything == {folder / key for key in bucket.list("")}
    assert all(key == "run.json" or key.startswith("weights/") for key in bucket.list(""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"norm": t["norm"][:8]}, "norm.*shape"),
        (lambda t: t | {"embed.weight": t["embed.weight"].T}, "embed.weight.*contiguous"),
        (lambda t: t | {"norm": t["norm"].astype(np.uint16)}, "norm.*F32"),
        (lambda t: t | {"norm": t["norm"].astype(np.float64)}, "norm.*F32"),
        (lambda t: t | {"../new": t["norm"]}, "only one of the two"),
        (lambda t: {k: v for k, v in t.items() if k != "mask"}, "mask"),
        (lambda t: {}, "only one of the two"),
    ],
)
def test_tensors_that_are_not_the_runs(bucket, change, message):
    publisher, wrong = start_publisher(bucket), change(weights(2))
    for _ in range(2):
        with pytest.raises(InputError, match=message) as caught:
            publisher.publish(wrong)
        one_line(caught.value)
        assert publisher.version == 1
    assert publisher.publish(weights(2)) == 2
    publisher.close()
    assert_nothing_lost(bucket, newest=2)


def test_a_version_of_another_run(bucket):
    """A manifest, validly sealed, that another run of the same model has committed."""
    other = open_bucket("memory://")
    publisher = start_publisher(other)
    for version in range(3):
        publisher.publish(weights(version, seed=0 if version == 0 else 5))
    publisher.close()
    for key in other.list(keys.BLOBS):
        bucket.create(key, other.get(key, limit=1 << 20))
    bucket.put(keys.manifest(2), other.get(keys.manifest(2), limit=1 << 20))
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, at=1)
    subscriber = Subscriber(bucket, run, mirror)
    assert subscriber.prepare() is None
    assert keys.manifest(2) in one_line(subscriber.alarm)
    assert mirror.version == 1
    assert same_bits(mirror.tensors, weights(1))
    goes_on_from_version_1(bucket, run)


def goes_on_from_version_1(bucket, run):
    """A publisher passes over the number that is taken; readers and fsck follow."""
    publisher = start_publisher(bucket)
    assert publisher.publish(weights(3)) == 3
    publisher.close()
    assert read_manifest(bucket, run, 3).base == 1
    for mirror in (load_mirror(bucket, run), load_mirror(bucket, run, at=1)):
        Subscriber(bucket, run, mirror).wait_for(3, timeout_s=120)
        assert same_bits(mirror.tensors, weights(3))


def test_a_version_that_builds_on_another_base(bucket):
    """Committed to a copy of the bucket that went its own way, and copied back."""
    fork = open_bucket("memory://")
    for key in bucket.list(""):
        fork.put(key, bucket.get(key, limit=1 << 20))
    fork.delete(keys.manifest(1))
    publisher = start_publisher(fork)
    for version in (1, 2):
        publisher.publish(weights(version, seed=6))
    publisher.close()
    for key in fork.list(keys.BLOBS):
        bucket.create(key, fork.get(key, limit=1 << 20))
    bucket.put(keys.manifest(2), fork.get(keys.manifest(2), limit=1 << 20))
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, at=1)
    with pytest.raises(CorruptError) as caught:
        Subscriber(bucket, run, mirror).prepare()
    assert "version 2" in one_line(caught.value)
    assert same_bits(mirror.tensors, weights(1))
    bucket.delete(keys.manifest(2))
    assert_nothing_lost(bucket)


def peak_bytes():
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.mark.skipif(sys.platform == "win32", reason="there is no getrusage")
@pytest.mark.parametrize("key", [keys.RUN, keys.manifest(1)])
def test_two_gigabytes_are_refused_before_memory(tmp_path, key):
    """The file is sparse: only who reads it pays for it."""
    bucket = open_bucket(str(tmp_path))
    publisher = start_publisher(bucket)
    for version in range(2):
        publisher.publish(weights(version))
    publisher.close()
    run, data = find_run(bucket), bucket.get(key, limit=1 << 20)
    with (tmp_path / key).open("r+b") as file:
        file.truncate(2 << 30)
    before = peak_bytes()
    with pytest.raises(CorruptError, match="2147483648 bytes exceeds the limit") as caught:
        find_run(bucket) if key == keys.RUN else read_manifest(bucket, run, 1)
    assert key in one_line(caught.value)
    if key == keys.RUN:
        with pytest.raises(CorruptError):
            start_publisher(bucket)
    else:
        # Version 0 is the newest that can be read, and number 1 is taken.
        publisher = start_publisher(bucket)
        assert publisher.version == 0
        assert publisher.publish(weights(1)) == 2
        publisher.close()
        bucket.delete(keys.manifest(2))
    assert peak_bytes() - before < 256 << 20
    bucket.put(key, data)
    assert_nothing_lost(bucket)


@pytest.fixture
def endless():
    """An endpoint whose every object claims two gigabytes, and what it got rid of of them."""
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(2 << 30))
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.end_headers()
            try:
                while sum(sent) < 2 << 30:
                    sent.append(self.wfile.write(bytes(1 << 20)))
            except OSError:
                self.close_connection = True

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    thread.join()
    server.server_close()


def test_two_gigabytes_are_not_fetched(endless, s3_server):
    endpoint, sent = endless
    bucket = s3_server.open_bare("s3://drills/x", endpoint=endpoint)
    with pytest.raises(CorruptError, match="2147483648 bytes exceeds the limit"):
        find_run(bucket)
    assert sum(sent) < 256 << 20


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("where", ["whole", "metadata", "unknown"])
def test_json_of_great_depth(bucket, where, sealed):
    run = read_run(bucket)
    data = bucket.get(keys.manifest(1), limit=1 << 20)
    body = {
        "whole": b'{"a":' + nested(10_000) + b"}",
        "metadata": data[: data.rindex(b',"blake3"')].replace(
            b"{", b'{"metadata":{"a":' + nested(10_000) + b"},", 1
        )
        + b"}",
        "unknown": data[: data.rindex(b',"blake3"')] + b',"more":' + nested(10_000) + b"}",
    }[where]
    assert len(body) > 20_000
    bucket.put(keys.manifest(1), seal_json(body, key=keys.manifest(1)) if sealed else body)
    with pytest.raises(CorruptError) as caught:
        read_manifest(bucket, run, 1)
    assert keys.manifest(1) in one_line(caught.value)
    assert same_bits(load_mirror(bucket, run, at=0).tensors, weights(0))
    bucket.put(keys.manifest(1), data)
    assert_nothing_lost(bucket)


def test_a_clock_that_jumps(bucket, monkeypatch):
    """Years to and fro, between any two looks at it: nothing that decides reads it."""
    years = 10 * 365 * 86400.0
    jumps = itertools.cycle([years, -years, 0.0, 1e-3 - time.time(), 3 * years, -2 * years])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    run = read_run(bucket)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=0))
    for version in range(2, 6):
        publisher = start_publisher(bucket, anchor_every=2)
        assert publisher.publish(weights(version)) == version
        publisher.close()
    while (update := subscriber.prepare()) is not None:
        subscriber.commit(update)
        assert same_bits(subscriber.mirror.tensors, weights(subscriber.mirror.version))
    assert subscriber.mirror.version == 5
    stamps = [read_manifest(bucket, run, version).created_at for version in range(2, 6)]
    assert stamps != sorted(stamps)
    assert_nothing_lost(bucket, newest=5)
