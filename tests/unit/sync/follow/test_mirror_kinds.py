"""Mirrors in part, in files, and shared: verified like whole ones, and never taken up half."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bare_bucket
from deltawire.sync import Subscriber, load_mirror, read_manifest
from deltawire.sync.follow.mirror import empty_mirror, rows_of, select
from deltawire.sync.follow.mirror_file import FileMirror, open_mirror
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import TENSORS, same_bits, start_publisher, start_run, weights
from deltawire.wire import keys

LAST = 7


@pytest.fixture(scope="module")
def bucket():
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket, anchor_every=3, blob_bytes=120)
    for version in range(LAST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@pytest.fixture(scope="module")
def run(bucket):
    return start_run(bucket)


def assert_part(mirror, version):
    """Whatever part a mirror holds equals what was published."""
    assert mirror.version == version
    for name, bits in mirror.tensors.items():
        start = mirror.starts.get(name, 0)
        assert np.array_equal(bits, weights(version)[name].reshape(-1)[start : start + bits.size])
    assert mirror.compute_held() == mirror.held_digest


EMBED = next(spec for spec in TENSORS if spec.name == "embed.weight")


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 24), st.integers(0, 24), st.integers(0, LAST), st.booleans())
def test_rows_of_a_tensor(bucket, run, first, end, start, other):
    first, end = sorted((first, end))
    wanted = {EMBED.name: (first, end)} | ({"norm": None} if other else {})
    mirror = load_mirror(bucket, run, at=start, wanted=wanted)
    assert mirror.tensors.keys() == wanted.keys()
    assert_part(mirror, start)
    subscriber = Subscriber(bucket, run, mirror)
    subscriber.advance()
    assert_part(mirror, LAST)
    assert mirror.digest.hex() == read_manifest(bucket, run, LAST).digest
    if first < end:
        assert np.array_equal(
            rows_of(mirror, EMBED, (first, end)), weights(LAST)[EMBED.name][first:end]
        )


def test_only_the_pieces_that_are_wanted_are_fetched(bucket, run):
    before = len(bucket.operations)
    load_mirror(bucket, run, at=LAST)
    whole = {key for _, key in bucket.operations[before:] if key.startswith(keys.BLOBS)}
    before = len(bucket.operations)
    load_mirror(bucket, run, at=LAST, wanted=["norm"])
    part = {key for _, key in bucket.operations[before:] if key.startswith(keys.BLOBS)}
    assert len(part) < len(whole) / 2


def test_a_wrong_piece_is_noticed_by_a_reader_of_a_part(bucket, run):
    """It cannot check the model's digest: the pieces' own must do."""
    for change in (lambda d: d[:-3] + bytes(3), lambda d: d[: len(d) // 2], lambda d: b""):
        bucket.damage("weights/blobs/*", change)
        for wanted in (["norm"], {"embed.weight": (0, 6)}, ["steps", "scale"]):
            try:
                mirror = load_mirror(bucket, run, at=LAST, wanted=wanted)
            except CorruptError:
                continue
            assert_part(mirror, LAST)
        bucket.heal()


@pytest.mark.parametrize(
    "wanted", [["none"], {"scale": (0, 1)}, {"norm": (0, 17)}, {"norm": (-1, 3)}, {"norm": (5, 4)}]
)
def test_what_is_not_there_is_refused(run, wanted):
    with pytest.raises(InputError):
        select(run, wanted)


def test_a_model_larger_than_the_machine_is_refused_before_memory_is_taken(run, monkeypatch):
    from deltawire.sync.follow import mirror

    monkeypatch.setattr(mirror, "memory_bytes", lambda: 100)
    with pytest.raises(InputError, match="machine has 100 bytes"):
        empty_mirror(run)


def test_a_file_is_opened_again(bucket, run, tmp_path):
    mirror = open_mirror(tmp_path / "m", run)
    assert mirror.version == -1
    load_mirror(bucket, run, at=2, into=mirror)
    assert same_bits(mirror.tensors, weights(2))
    mirror.close()
    again = open_mirror(tmp_path / "m", run)
    assert again.version == 2
    assert same_bits(again.tensors, weights(2))
    assert Subscriber(bucket, run, again).advance()
    assert same_bits(again.tensors, weights(LAST))
    again.close()
    last = open_mirror(tmp_path / "m", run)
    assert last.version == LAST
    last.close()


def test_every_flipped_byte_of_a_file_is_noticed(bucket, run, tmp_path):
    path = tmp_path / "m"
    mirror = open_mirror(path, run)
    load_mirror(bucket, run, at=1, into=mirror)
    mirror.close()
    good = path.read_bytes()
    used = sum(spec.count * codec.ITEMSIZE[spec.dtype] for spec in TENSORS)
    padded = -(-used // 64) * 64
    noticed = 0
    for place in [*range(120), *range(4096, len(good), 7)]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        mirror = open_mirror(path, run)
        if mirror.version != -1:
            # Padding, or the sequence, which by itself says nothing but odd or even.
            assert 56 <= place < 64 or place >= 4096
            assert mirror.version == 1
            assert mirror.digest.hex() == read_manifest(bucket, run, 1).digest
            assert same_bits(mirror.tensors, weights(1))
        noticed += mirror.version == -1
        mirror.close()
    assert noticed > 112 + padded // 7 // 2


def test_a_file_of_another_run_or_other_tensors_is_not_used(bucket, run, tmp_path):
    path = tmp_path / "m"
    mirror = open_mirror(path, run, ["norm"])
    load_mirror(bucket, run, at=1, into=mirror)
    mirror.close()
    for wanted, version in ((["norm"], 1), ({"norm": None, "scale": None}, -1)):
        mirror = open_mirror(path, run, wanted)
        assert mirror.version == version
        mirror.close()


def test_two_writers_are_refused(run, tmp_path):
    mirror = open_mirror(tmp_path / "m", run)
    with pytest.raises(InputError, match="cannot store a mirror"):
        open_mirror(tmp_path / "m", run)
    mirror.close()
    open_mirror(tmp_path / "m", run).close()


KILLED = """
import sys
from deltawire.store import open_bare_bucket
from deltawire.sync import Subscriber, load_mirror, find_run, read_run
from deltawire.sync.follow.mirror_file import open_mirror
bucket = open_bare_bucket(sys.argv[1])
run = read_run(bucket)
mirror = open_mirror(sys.argv[2], run)
load_mirror(bucket, run, at=1, into=mirror)
update = Subscriber(bucket, run, mirror, stepwise=True).prepare()
mirror.begin()
piece = update.pieces[0]
mirror.find(piece.name, piece.start, 1 + int(piece.positions[-1]))[piece.positions] = piece.bits
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_in_the_middle_of_a_step(tmp_path):
    bucket = open_bare_bucket(str(tmp_path / "b"), create=True)
    publisher = start_publisher(bucket)
    for version in range(3):
        publisher.publish(weights(version))
    publisher.close()
    path = tmp_path / "m"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "b"), str(path)], check=False
    )
    assert done.returncode == -signal.SIGKILL
    mirror = open_mirror(path, publisher.run)
    assert mirror.version == -1, "half a step was taken up"
    load_mirror(bucket, publisher.run, into=mirror)
    assert same_bits(mirror.tensors, weights(2))
    mirror.close()


def test_no_room_is_one_clear_error(run, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot store a mirror"):
        FileMirror(tmp_path / "folder", run, select(run, None))
