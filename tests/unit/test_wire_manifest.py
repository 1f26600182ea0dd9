"""A manifest is believed only if every one of its rules holds."""

import msgspec
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.manifest import (
    MAX_BLOB_BYTES,
    BlobRef,
    Manifest,
    Payload,
    Piece,
    decode_manifest,
)
from deltawire.wire.objects import encode_json
from deltawire.wire.run import TensorSpec

TENSORS = [
    TensorSpec("a", (4, 5), "BF16"),
    TensorSpec("none", (0, 7), "BF16"),
    TensorSpec("b", (), "F32"),
]
HASH = "0123456789abcdef" * 4
BLOBS = [BlobRef(HASH, 100), BlobRef(HASH[::-1], 50)]
ANCHOR = [Piece(0, 0, 20, 0, 0, 60), Piece(1, 0, 0, 0, 60, 40), Piece(2, 0, 1, 1, 0, 50)]
DELTA = [Piece(0, 3, 4, 0, 0, 100), Piece(2, 0, 1, 1, 10, 40)]


def manifest(**changes):
    fields = {
        "version": 4,
        "base": 3,
        "delta": Payload(BLOBS, DELTA, 5),
        "anchor": Payload(BLOBS, ANCHOR, 21),
        "digest": "0" * 32,
        "epoch": 1,
        "nonce": "n",
        "created_at": 1.5,
        "annex": {"step": 3, "consumed": [["w", 1]]},
    }
    return Manifest(**{**fields, **changes})


def decode(data, version=4):
    return decode_manifest(data, version=version, tensors=TENSORS, run="s3://b", key="the/key")


def refused(value, version=4):
    data = value if isinstance(value, bytes) else encode_json(value)
    with pytest.raises(CorruptError) as caught:
        decode(data, version)
    assert caught.value.key == "the/key"
    assert caught.value.run == "s3://b"
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def anchored(pieces, blobs=BLOBS):
    return manifest(base=None, delta=None, anchor=Payload(blobs, pieces, 21))


def changed(pieces, blobs=BLOBS):
    return manifest(anchor=None, delta=Payload(blobs, pieces, 5))


@pytest.mark.parametrize(
    "value",
    [
        manifest(),
        manifest(anchor=None),
        manifest(base=None, delta=None),
        manifest(delta=Payload([], [], 0)),
        anchored(ANCHOR[::-1]),
        anchored([Piece(0, 0, 8, 0, 0, 9), Piece(0, 8, 12, 1, 0, 9), *ANCHOR[1:]]),
        anchored([ANCHOR[0], ANCHOR[2]]),
        changed([Piece(0, 0, 3, 0, 0, 1), Piece(0, 3, 17, 0, 0, 1)]),
        manifest(anchor=None, base=0),
    ],
)
def test_good_manifests_come_back(value):
    assert decode(encode_json(value)) == value


def test_unknown_fields_are_a_newer_writers():
    data = encode_json(manifest()).replace(b"{", b'{"colour":1,', 1)
    assert decode(data) == manifest()


def test_bytes_of_a_payload():
    assert manifest().anchor.bytes == 150


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (manifest(format=2), "format 2"),
        (manifest(version=5, base=3), "it says version 5"),
        (manifest(delta=None, anchor=None), "neither a delta nor an anchor"),
        (manifest(base=None), "a delta without an earlier base"),
        (manifest(base=4), "a delta without an earlier base"),
        (manifest(base=5), "a delta without an earlier base"),
        (changed(DELTA, [BlobRef(HASH, MAX_BLOB_BYTES + 1), BLOBS[1]]), "a blob of"),
        (changed([Piece(3, 0, 1, 0, 0, 1)]), "a piece of tensor number 3 of 3"),
        (changed([Piece(0, 0, 1, 2, 0, 1)]), "a piece in blob number 2 of 2"),
        (changed([Piece(0, 0, 1, 1, 50, 1)]), "ends behind its blob"),
        (changed([Piece(0, 0, 1, 0, 1 << 48, 1 << 48)]), "ends behind its blob"),
        (changed([Piece(0, 20, 1, 0, 0, 1)]), "ends behind tensor a"),
        (changed([Piece(0, 1 << 48, 1 << 48, 0, 0, 1)]), "ends behind tensor a"),
        (changed([Piece(1, 0, 1, 0, 0, 1)]), "ends behind tensor none"),
        (changed([Piece(0, 0, 4, 0, 0, 1), Piece(0, 3, 4, 0, 0, 1)]), "tensor a overlap"),
        (changed([Piece(0, 3, 4, 0, 0, 1), Piece(0, 0, 4, 0, 0, 1)]), "tensor a overlap"),
        (changed([DELTA[0], DELTA[0]]), "tensor a overlap"),
        (anchored([ANCHOR[0], *ANCHOR]), "tensor a overlap"),
        (anchored(ANCHOR[1:]), "does not cover"),
        (anchored(ANCHOR[:2]), "does not cover"),
        (anchored([]), "does not cover"),
        (anchored([Piece(0, 1, 19, 0, 0, 60), *ANCHOR[1:]]), "tensor a overlap or leave a gap"),
        (anchored([Piece(0, 0, 19, 0, 0, 60), *ANCHOR[1:]]), "does not cover"),
        (
            anchored([Piece(0, 0, 8, 0, 0, 9), Piece(0, 9, 11, 1, 0, 9), *ANCHOR[1:]]),
            "tensor a overlap or leave a gap",
        ),
    ],
)
def test_each_rule_broken_in_turn(value, reason):
    assert reason in refused(value)


def test_both_payloads_are_checked():
    bad = Payload(BLOBS, [Piece(9, 0, 1, 0, 0, 1)], 1)
    assert "tensor number 9" in refused(manifest(delta=bad))
    assert "tensor number 9" in refused(manifest(anchor=bad))


def plain(**changes):
    return msgspec.json.encode({**msgspec.to_builtins(manifest()), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": 4.5},
        {"version": "4"},
        {"version": (1 << 48) + 1},
        {"base": -1},
        {"epoch": None},
        {"digest": "0" * 31},
        {"digest": "0" * 33},
        {"digest": "0" * 32 + "\n"},
        {"digest": "G" * 32},
        {"nonce": "n" * 65},
        {"created_at": "now"},
        {"annex": []},
        {"delta": {"blobs": [], "pieces": []}},
        {"delta": {"blobs": [{"hash": HASH[:-1], "bytes": 1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": HASH + "\n", "bytes": 1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": "../" + HASH[3:], "bytes": 1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": HASH, "bytes": -1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": HASH, "bytes": 1}] * 65537, "pieces": [], "changed": 0}},
        {"delta": {"blobs": [], "pieces": [[0, 0, 1, 0, 0]], "changed": 0}},
        {"delta": {"blobs": [], "pieces": [[0, -1, 1, 0, 0, 0]], "changed": 0}},
    ],
)
def test_values_outside_their_limits(changes):
    assert "not a valid manifest" in refused(plain(**changes))


@pytest.mark.parametrize("field", ["version", "digest", "epoch", "nonce", "created_at"])
def test_missing_fields(field):
    value = msgspec.to_builtins(manifest())
    del value[field]
    assert field in refused(msgspec.json.encode(value))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_of_ten_thousand(opening):
    closing = {b"[": b"]"}.get(opening, b"}")
    deep = opening * 10_000 + b"1" + closing * 10_000
    data = encode_json(manifest(annex={})).replace(b'"annex":{}', b'"annex":{"x":%s}' % deep)
    assert "nested too deeply" in refused(data)
    unknown = encode_json(manifest()).replace(b"{", b'{"unknown":%s,' % deep, 1)
    assert "nested too deeply" in refused(unknown)
    assert "not a valid manifest" in refused(deep)


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"{", b"\0" * 9, b"\xff", b'{"nonce":"\xff"}']
)
def test_bytes_that_are_no_manifest(data):
    assert "not a valid manifest" in refused(data)


def test_a_cut_at_any_place_is_noticed():
    data = encode_json(manifest()).rstrip()
    for length in range(len(data)):
        refused(data[:length])
