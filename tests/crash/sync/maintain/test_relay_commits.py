"""A relay commits what it copied and checked by name; readers decode, and refuse what is wrong."""

import msgspec
import pytest

from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync import Relay, Subscriber, load_mirror, read_manifest
from deltawire.sync.chain.objects import get_blob, put_blob
from deltawire.sync.chain.payloads import read_payload, store_payload
from deltawire.sync.follow.fetch import piece_hash
from deltawire.sync.maintain import region_anchors
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import flip_bit
from deltawire.testing.tiny import audit, same_bits, start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.manifest import encode_manifest
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

    source, destination = open_bucket("memory://"), open_bucket("memory://")
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
    source, destination = open_bucket("memory://"), open_bucket("memory://")
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
