"""A region's bucket: the same versions, the same bytes, each across once, whatever happens."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anchored import anchor_of, anchor_payload
from history import snapshot
from key_meter import KeyMeter

from benchmarks.synthetic import SyntheticSteps
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import Bucket, MeteredBucket, RetryingBucket, open_bare_bucket
from deltawire.sync import (
    Relay,
    find_run,
    load_mirror,
    open_publisher,
    prune,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.maintain.relay import Relayed
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.tiny import TENSORS, audit, same_bits, start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.signing import Ed25519Signer


def publish(bucket: Bucket, first: int, last: int, **options: Any) -> None:
    publisher = start_publisher(bucket, **options)
    for version in range(first, last + 1):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()


def relay(source: Bucket, destination: Bucket, **options: Any) -> Relay:
    carrier = Relay(source, destination, start=0, strides=(), **options)
    try:
        carrier.advance()
    finally:
        carrier.close()
    return carrier


def contents(bucket: Bucket, prefix: str = "") -> dict[str, bytes | None]:
    return {key: bucket.get(key, limit=1 << 30) for key in bucket.list(prefix)}


def test_the_destination_is_the_source_byte_for_byte() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 9)
    relay(source, destination)
    assert contents(destination) == contents(source)
    assert audit(destination, weights) == 9
    assert check_run(destination).faults == []


def test_anchors_after_the_first_never_cross() -> None:
    inner, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(inner, 0, 9, anchor_every=3)
    source = KeyMeter(inner)
    relay(source, destination)
    run = read_run(inner)
    anchors: set[str] = set()
    deltas: set[str] = set()
    for version in range(1, 10):
        manifest = read_manifest(inner, run, version)
        assert manifest is not None
        assert manifest.delta is not None
        deltas |= {keys.blob(ref.hash) for ref in read_blobs(inner, run, manifest.delta)}
        if anchor_of(inner, run, version) is not None:
            anchors |= {keys.blob(ref.hash) for ref in anchor_payload(inner, run, version).blobs}
    assert len(anchors) == 3
    assert not anchors & set(source.read_keys)
    for key in deltas:  # and each delta crosses once
        assert source.read_keys[key] == inner.size(key)


def test_a_blob_that_another_coder_made_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire import codec
    from deltawire.sync.maintain import region_anchors as module

    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 4)
    real = codec.encode_full

    def other(*args: Any, **options: Any) -> bytes:
        return real(*args, **options)[::-1]

    monkeypatch.setattr(module.codec, "encode_full", other)
    carrier = Relay(source, destination, start=0, strides=())
    done: list[Relayed] = []
    carrier.advance(done.append)
    carrier.close()
    assert {one.version for one in done if one.version and one.anchor_copied} == {3}
    assert sum(one.anchor_made for one in done) == 0
    assert check_run(destination).faults == []


def test_a_signed_run_verifies_at_the_destination_without_the_key() -> None:
    signer = Ed25519Signer.generate()
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publisher = open_publisher(
        source, weights(0), specs=TENSORS, signer=signer, anchor_every=3, compaction_strides=(2, 4)
    )
    for version in range(1, 9):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()
    carrier = Relay(source, destination, public_key=signer.public_key, start=0, strides=(2, 4))
    carrier.advance()
    carrier.close()
    assert contents(destination, "weights/manifests/") == contents(source, "weights/manifests/")
    assert contents(destination, "weights/compacted/") == contents(source, "weights/compacted/")
    assert destination.list(keys.COMPACTED)
    assert check_run(destination, public_key=signer.public_key).faults == []
    with pytest.raises(CorruptError, match="another key"):
        find_run(destination, public_key=Ed25519Signer.generate().public_key)


def test_compacted_deltas_are_made_at_the_destination() -> None:
    inner, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(inner, 0, 8)
    source = KeyMeter(inner)
    carrier = Relay(source, destination, start=0, strides=(2, 4))
    carrier.advance()
    carrier.close()
    assert len(destination.list(keys.COMPACTED)) >= 4
    read = [keys.compacted_of(key) for key in source.read_keys if key.startswith(keys.COMPACTED)]
    assert {base for base, _ in read} == {None}, "the anchors' objects"
    assert audit(destination, weights) == 8


def test_a_new_region_begins_with_the_newest_anchor() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 8, anchor_every=3)
    carrier = Relay(source, destination, strides=())
    assert [done.version for done in iter(carrier.step, None)] == [6, 7, 8]
    carrier.close()
    found = check_run(destination)
    assert found.whole
    assert found.first == 6
    run = read_run(destination)
    mirror = load_mirror(destination, run)
    assert mirror.version == 8


def test_versions_that_retention_took_from_the_source_are_passed() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 4, anchor_every=3)
    relay(source, destination)
    publish(source, 5, 11, anchor_every=3)
    run = read_run(source)
    assert prune(source, run, cutoff=9, grace_s=0).pruned_below == 9
    assert relay(source, destination).version == 11
    assert relay(source, destination).version == 11
    mirror = load_mirror(destination, run)
    assert mirror.version == 11
    publish(source, 12, 12, anchor_every=3)
    assert relay(source, destination).version == 12


def test_versions_that_are_pruned_before_the_first_is_copied_are_passed() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 8, anchor_every=3)
    carrier = Relay(source, destination, start=0, strides=())
    run = read_run(source)
    prune(source, run, cutoff=8, grace_s=0)
    assert carrier.version == -1
    carrier.advance()
    carrier.close()
    mirror = load_mirror(destination, run)
    assert same_bits(mirror.tensors, weights(8))


def test_a_region_does_not_grow_for_ever() -> None:
    """The destination prunes what the source has pruned, and nothing else."""
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 4, anchor_every=3)
    relay(source, destination, grace_s=0)
    assert contents(destination) == contents(source)
    publish(source, 5, 11, anchor_every=3)
    run = read_run(source)
    carrier = Relay(source, destination, strides=(), grace_s=0)
    assert carrier.advance() == 7
    assert prune(source, run, cutoff=9, grace_s=3600).floor == 9
    assert carrier.advance() == 0
    assert destination.list(keys.RETENTION_FLOORS) == [keys.retention_floor(9)]
    # Closed, but nothing is pruned at the source yet: all stays here too.
    assert contents(destination, keys.BLOBS) == contents(source, keys.BLOBS)
    assert prune(source, run, cutoff=9, grace_s=0).pruned_below == 9
    carrier.advance()
    assert contents(destination, keys.MANIFESTS) == contents(source, keys.MANIFESTS)
    assert contents(destination, keys.BLOBS) == contents(source, keys.BLOBS)
    assert check_run(destination).faults == []
    assert carrier.prune() is None  # It asks for no more than the source's floor.
    carrier.close()


def test_a_region_may_keep_versions_that_the_source_prunes() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 9, anchor_every=3)
    relay(source, destination, grace_s=0)
    run = read_run(source)
    prune(source, run, cutoff=9, grace_s=0)
    relay(source, destination, retain=False, grace_s=0)
    assert audit(destination, weights) == 9
    relay(source, destination, grace_s=3600)
    assert audit(destination, weights) == 9


@pytest.mark.parametrize("signed", [False, True])
def test_a_region_that_began_later_prunes_without_the_key(signed: bool) -> None:
    signer = Ed25519Signer.generate() if signed else None
    public_key = signer.public_key if signer else ""
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publisher = open_publisher(
        source, weights(0), specs=TENSORS, signer=signer, anchor_every=3, compaction_strides=()
    )
    for version in range(1, 12):
        publisher.publish(weights(version))
        publisher.flush()
    carrier = Relay(source, destination, public_key=public_key, start=4, strides=(), grace_s=0)
    assert carrier.advance() == 9
    found = check_run(destination, public_key=public_key)
    assert (found.faults, found.first, found.floor) == ([], 3, 3)
    prune(source, publisher.run, cutoff=8, grace_s=0, signer=signer)
    carrier.advance()
    found = check_run(destination, public_key=public_key)
    assert (found.faults, found.first, found.floor, found.pruned) == ([], 3, 6, 3)
    assert contents(destination, keys.BLOBS) == contents(source, keys.BLOBS)
    publisher.publish(weights(12))
    publisher.close()
    assert carrier.advance() == 1
    carrier.close()
    mirror = load_mirror(destination, publisher.run)
    assert mirror.version == 12


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("done", [False, True])
def test_following_retention_may_fail_at_each_operation(
    side: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.store.retrying.FIRST_PAUSE_S", 0.0)
    inner, filled = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(inner, 0, 6, anchor_every=3)
    relay(inner, filled)
    run = read_run(inner)
    prune(inner, run, cutoff=3, grace_s=0)
    for at in range(1, 100):
        source, destination = FaultyBucket(inner), FaultyBucket(snapshot(filled))
        carrier = Relay(RetryingBucket(source), RetryingBucket(destination), strides=(), grace_s=0)
        faulty = source if side == "source" else destination
        faulty.fail(at=at, done=done, times=None)
        failed = False
        try:
            carrier.prune()
        except RetryError:
            failed = True
        faulty.heal()
        for version in (3, 6):
            mirror = load_mirror(destination, run, at=version)
            assert same_bits(mirror.tensors, weights(version))
        carrier.prune()
        carrier.close()
        for prefix in (keys.MANIFESTS, keys.BLOBS):
            assert contents(destination, prefix) == contents(inner, prefix)
        if not failed:
            assert at > 4
            return
    raise AssertionError("it never got through")


@pytest.mark.parametrize("stopped_is", ["relay", "retention"])
def test_versions_below_copied_tombstones_are_closed_though_it_stops_at_any_operation(
    stopped_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that stood still while the source pruned copies tombstones above what it had. The
    relay closes them, or retention without the source does."""
    monkeypatch.setattr("deltawire.store.retrying.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("deltawire.sync.chain.retention.WINDOW", 2)
    source, filled = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 4, anchor_every=3)
    relay(source, filled)
    publish(source, 5, 14, anchor_every=3)
    run = read_run(source)
    prune(source, run, cutoff=12, grace_s=0)
    relay(source, filled, retain=False)
    for at in range(1, 100):
        destination = FaultyBucket(snapshot(filled))
        patient = RetryingBucket(destination)
        carrier = Relay(source, patient, strides=(), grace_s=0)
        own = partial(prune, patient, run, cutoff=12, grace_s=0)
        close = carrier.prune if stopped_is == "relay" else own
        destination.fail(at=at, done=True, times=None)
        stopped = False
        try:
            close()
        except RetryError:
            stopped = True
        destination.heal()
        close()
        carrier.close()
        for prefix in (keys.MANIFESTS, keys.BLOBS):
            assert contents(destination, prefix) == contents(source, prefix)
        assert check_run(destination).faults == []
        if not stopped:
            assert at > 20
            return
    raise AssertionError("it never got through")


def test_a_relay_killed_before_it_checked_its_blobs() -> None:
    """The commit succeeds, then retention deletes a blob that was an old orphan before it."""
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 6, anchor_every=3)
    relay(source, destination)
    run = read_run(source)
    manifest = read_manifest(destination, run, 6)
    assert manifest is not None
    assert manifest.delta is not None
    for ref in (
        *read_blobs(source, run, manifest.delta),
        *anchor_payload(source, run, 6).blobs,
    ):
        destination.delete(keys.blob(ref.hash))
    assert relay(source, destination).version == 6
    assert contents(destination) == contents(source)


def test_a_destination_that_holds_something_else_is_not_touched() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 2)
    other = start_publisher(destination, seed=1)
    other.publish(weights(0, seed=1))
    other.close()
    before = contents(destination)
    with pytest.raises(InputError, match="another run"):
        relay(source, destination)
    assert contents(destination) == before


def test_a_fork_at_the_destination_is_an_error() -> None:
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 2)
    first = Relay(source, destination, start=0, strides=())
    first.step()
    second = start_publisher(destination)  # somebody publishes into the copy
    second.publish(weights(5))
    second.close()
    with pytest.raises(CorruptError, match="another version of this number"):
        first.step()
    first.close()


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("done", [False, True])
def test_each_operation_failed_in_turn(
    side: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.store.retrying.FIRST_PAUSE_S", 0.0)
    inner = open_bare_bucket("memory://")
    publish(inner, 0, 2, anchor_every=2)
    for at in range(1, 100):
        source, destination = FaultyBucket(inner), FaultyBucket(open_bare_bucket("memory://"))
        faulty = source if side == "source" else destination
        faulty.fail(at=at, done=done, times=None)
        failed = False
        try:
            relay(RetryingBucket(source), RetryingBucket(destination))
        except RetryError:
            failed = True
        faulty.heal()
        # The versions committed so far can be read, and the rest follows.
        assert audit(destination, weights) <= 2
        assert relay(inner, destination).version == 2
        assert contents(destination) == contents(inner)
        if not failed:
            assert at > 10
            return
    raise AssertionError("it never got through")


def test_a_turned_bit_on_the_way_is_not_passed_on() -> None:
    inner, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(inner, 0, 3)
    source = FaultyBucket(inner)
    source.damage("weights/blobs/*", lambda data: flip_bit(data, 77))
    with pytest.raises(CorruptError):
        relay(source, destination)
    assert destination.list(keys.BLOBS) == []
    source.heal()
    relay(source, destination)
    assert contents(destination) == contents(inner)


def test_a_damaged_blob_at_the_destination_is_fetched_again() -> None:
    source, inner = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 1)
    relay(source, inner)
    publish(source, 2, 2)
    run = read_run(source)
    manifest = read_manifest(source, run, 2)
    assert manifest is not None
    assert manifest.delta is not None
    key = keys.blob(read_blobs(source, run, manifest.delta)[0].hash)
    data = source.get(key, limit=1 << 20)
    assert data is not None
    inner.put(key, flip_bit(data, 9))
    relay(source, inner)
    assert contents(inner) == contents(source)


def test_a_relay_continues_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    source = open_bare_bucket(str(tmp_path / "source"), create=True)
    publisher = start_publisher(source, anchor_every=4)
    for version in range(40):
        publisher.publish(weights(version))
    publisher.close()
    chance = random.Random(4)
    script = Path(__file__).parents[3] / "support/relay_to_kill.py"
    arguments = [sys.executable, str(script), str(tmp_path / "source"), str(tmp_path / "copy")]
    reached = []
    for _ in range(8):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"relaying\n"
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.wait()
        process.stdout.close()
        reached.append(audit(open_bare_bucket(str(tmp_path / "copy")), weights))
    assert reached == sorted(reached)
    relay(source, open_bare_bucket(str(tmp_path / "copy")))
    copy = open_bare_bucket(str(tmp_path / "copy"))
    assert contents(copy, "weights/manifests/") == contents(source, "weights/manifests/")
    assert check_run(copy).whole


def test_fifty_versions_move_a_fiftieth_of_fifty_models() -> None:
    """The figure of the README, at a density of one in a hundred: with the first model at most
    3 % of fifty, then at most 1 % a window."""
    steps = SyntheticSteps(1 << 21, 0.01)
    inner, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publisher = open_publisher(
        inner,
        steps.tensors,
        specs=steps.specs,
        anchor_every=25,
        compaction_strides=(),
        chunk=1 << 18,
    )
    source = MeteredBucket(inner)
    carrier = Relay(source, destination, strides=())
    shares = []
    for _ in range(2):
        before = source.read_bytes
        if not shares:
            carrier.advance()
        for _ in range(50 - (0 if shares else 1)):
            steps.advance()
            publisher.publish(steps.tensors)
            publisher.flush()
            carrier.advance()
        shares.append((source.read_bytes - before) / (50 * steps.bytes))
    publisher.close()
    carrier.close()
    mirror = load_mirror(destination, publisher.run)
    assert mirror.version == carrier.version == 99
    name = steps.specs[0].name
    assert np.array_equal(mirror.tensors[name], steps.tensors[name].reshape(-1))
    assert shares[0] <= 0.03
    assert shares[1] <= 0.01


@pytest.mark.parametrize("trouble", ["junk", "lost", "far"])
def test_a_manifest_that_cannot_be_read_at_the_source_is_passed_over(trouble: str) -> None:
    """It is reported; versions after it are copied, and readers of the region reach the newest."""
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publisher = start_publisher(source, anchor_every=3)
    for version in range(3):
        publisher.publish(weights(version))
        publisher.flush()
    carrier = Relay(source, destination, start=0, strides=(), grace_s=0)
    for version in range(3, 8):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()
    if trouble == "lost":
        source.delete(keys.manifest(4))
    else:
        source.put(keys.manifest(4 if trouble == "junk" else 9_999_999_999), b"junk")
    done = []
    carrier.advance(done.append)
    carrier.close()
    copied = [one.version for one in done if one.kind == "version"]
    passed_over = set() if trouble == "far" else {4}
    assert copied == [v for v in range(8) if v not in passed_over]
    assert any(one.alarm for one in done) == (trouble == "junk")
    assert same_bits(load_mirror(destination, publisher.run).tensors, weights(7))
