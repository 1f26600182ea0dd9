"""A relay commits what it copied and checked by name; readers decode, and refuse what is wrong."""

import threading

import msgspec
import pytest
from key_meter import KeyMeter

from deltawire.errors import CorruptError
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.sync import Relay, Subscriber, load_mirror, read_manifest
from deltawire.sync.chain.objects import (
    get_blob,
    later_anchors,
    put_blob,
    read_compacted_delta,
)
from deltawire.sync.chain.payloads import read_payload, store_payload
from deltawire.sync.follow.fetch import piece_hash
from deltawire.sync.maintain import region_anchors
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import flip_bit
from deltawire.testing.tiny import audit, same_bits, start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.manifest import encode_compacted, encode_manifest
from deltawire.wire.payload import Payload


def publish(bucket, first, last, **options):
    publisher = start_publisher(bucket, **options)
    for version in range(first, last + 1):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()
    return publisher.run


def poison(bucket, run, version):
    """Replaces a version by one whose names, seals and sums fit together, and whose bits do not."""
    manifest = read_manifest(bucket, run, version)
    payload = read_payload(bucket, run, manifest, manifest.delta)
    blobs = [flip_bit(bytes(get_blob(bucket, ref)), -1) for ref in payload.blobs]
    pieces = [
        msgspec.structs.replace(
            piece, hash=piece_hash(blobs[piece.blob][piece.offset : piece.offset + piece.length])
        )
        for piece in payload.pieces
    ]
    wrong = Payload([put_blob(bucket, data) for data in blobs], pieces)
    ref = store_payload(bucket, run, wrong, version=version)
    changed = msgspec.structs.replace(manifest, delta=ref)
    bucket.put(keys.manifest(version), encode_manifest(changed))


def test_no_version_waits_for_decoding(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the relay decoded a version")

    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    run = publish(source, 0, 5, anchor_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(region_anchors, "load_mirror", refuse)
        patch.setattr(region_anchors, "decode_delta", refuse)
        relay = Relay(source, destination, strides=())
        assert relay.advance() == 6
        relay.close()
    assert audit(destination, weights) == 5
    assert check_run(destination).faults == []
    assert run.id == relay.run.id


def test_a_poisoned_version_is_refused_by_readers_there_as_here():
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    run = publish(source, 0, 4, anchor_every=3)
    poison(source, run, 1)
    relay = Relay(source, destination, start=0, strides=())
    assert relay.step().version == 0
    reader = Subscriber(destination, run, load_mirror(destination, run))
    assert relay.step().version == 1
    assert relay.step().version == 2
    with pytest.raises(CorruptError, match="digest"):
        reader.prepare()
    assert same_bits(reader.mirror.tensors, weights(0)), "a reader holds what it held"
    done = []
    relay.advance(done.append)
    relay.close()
    # Its own deltas do not lead to the anchor, so this crosses whole, and the relay says why.
    assert sum(one.anchor_copied for one in done) > 0
    assert any("digest" in one.anchor_error for one in done)
    assert reader.advance()
    assert same_bits(reader.mirror.tensors, weights(4))
    assert {fault.version for fault in check_run(destination).faults} == {1, 2}


class Held(DelegatingBucket):
    """Holds puts of blobs back until told, after the first ``free`` of them."""

    def __init__(self, inner, *, free):
        super().__init__(inner)
        self.free, self.go, self.waiting = free, threading.Event(), threading.Event()

    def put(self, key, data):
        if key.startswith(keys.BLOBS):
            self.free -= 1
            if self.free < 0:
                self.waiting.set()
                assert self.go.wait(250)
        super().put(key, data)


def test_a_slow_anchor_holds_no_version_back():
    source, inner = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 9, anchor_every=3)
    deltas = 10  # And the anchor of version 0.
    destination = Held(inner, free=deltas)
    relay = Relay(source, destination, start=0, strides=())
    while relay.version < 9:
        assert relay.step() is not None
    assert destination.waiting.wait(250), "the anchor of version 3 is being stored"
    assert audit(inner, weights) == 9
    assert later_anchors(inner, newer_than=-1) == []
    destination.go.set()
    relay.advance()
    relay.close()
    assert later_anchors(inner, newer_than=-1) == [3, 6, 9]
    assert set(inner.list("")) == set(source.list(""))


def test_anchors_are_made_after_a_stop_before_them(monkeypatch):
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    publish(source, 0, 7, anchor_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(region_anchors.RegionAnchors, "wake", lambda *_: None)
        stopped = Relay(source, destination, start=0, strides=())
        while stopped.step() is not None:
            pass
        stopped.close()
    assert later_anchors(destination, newer_than=-1) == []
    metered = KeyMeter(source)
    relay = Relay(metered, destination, strides=())
    done = []
    assert relay.advance(done.append) == 0
    relay.close()
    made = {one.version: one for one in done}
    assert made.keys() == {3, 6}
    assert all(one.kind == "anchor" and one.anchor_made and not one.anchor_copied for one in done)
    assert later_anchors(destination, newer_than=-1) == [3, 6]
    assert not [key for key in metered.read_keys if key.startswith(keys.BLOBS)], "none crosses"
    assert check_run(destination).faults == []


def test_an_anchor_of_another_model_is_not_taken():
    source, destination = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    run = publish(source, 0, 4, anchor_every=3)
    later = read_compacted_delta(source, run, None, 3)
    wrong = msgspec.structs.replace(later, digest="0" * 32)
    source.put(keys.compacted(None, 3), encode_compacted(wrong))
    relay = Relay(source, destination, start=0, strides=())
    assert relay.advance() == 5
    assert "anchor" in str(relay.anchors.error) or "payload" in str(relay.anchors.error)
    relay.close()
    assert later_anchors(destination, newer_than=-1) == []
    assert audit(destination, weights) == 4
