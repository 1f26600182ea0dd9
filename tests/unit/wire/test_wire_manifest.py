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
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.seal import seal_json

TENSORS = [
    TensorSpec("a", (4, 5), "BF16"),
    TensorSpec("none", (0, 7), "BF16"),
    TensorSpec("b", (), "F32"),
]
HASH = "0123456789abcdef" * 4
CHUNK = 8
ZERO, ONE = "0" * 32, "0" * 15 + "1" + "f" * 16
TABLE = Run(id="ab" * 16, name="r", created_at=0.0, tensors=TENSORS, digest="c" * 32, chunk=CHUNK)
BLOBS = [BlobRef(HASH, 100), BlobRef(HASH[::-1], 50)]


def piece(*place, total=ZERO):
    return Piece(*place, total, "d" * 32)


ANCHOR = [
    piece(0, 0, 8, 0, 0, 20),
    piece(0, 8, 8, 0, 20, 20),
    piece(0, 16, 4, 0, 40, 20),
    piece(1, 0, 0, 0, 60, 40),
    piece(2, 0, 1, 1, 0, 50),
]
DELTA = [piece(0, 3, 4, 0, 0, 100), piece(2, 0, 1, 1, 10, 40)]


def encode_json(value):
    """As it lies in the bucket."""
    return seal_json(msgspec.json.encode(value), key="the/key")


def manifest(**changes):
    fields = {
        "run": TABLE.id,
        "version": 4,
        "base": 3,
        "delta": Payload(BLOBS, DELTA, 5),
        "anchor": Payload(BLOBS, ANCHOR, 21),
        "digest": "0" * 32,
        "epoch": 1,
        "nonce": "n",
        "created_at": 1.5,
        "metadata": {"step": 3, "consumed": [["w", 1]]},
    }
    return Manifest(**{**fields, **changes})


def decode(data, version=4):
    return decode_manifest(data, version=version, table=TABLE, run="s3://b", key="the/key")


def refused(value, version=4):
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    if data.endswith(b"}"):
        data = seal_json(data, key="the/key")
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
        anchored([piece(0, 0, 6, 0, 0, 9), piece(0, 6, 2, 1, 0, 9), *ANCHOR[1:]]),
        anchored([*ANCHOR[:3], ANCHOR[4]]),
        changed([piece(0, 0, 3, 0, 0, 1), piece(0, 3, 5, 0, 0, 1)]),
        manifest(anchor=None, base=0),
    ],
)
def test_good_manifests_come_back(value):
    assert decode(encode_json(value)) == value


def test_unknown_fields_are_a_newer_writers():
    plain = msgspec.json.encode(manifest()).replace(b"{", b'{"colour":1,', 1)
    assert decode(seal_json(plain, key="k")) == manifest()


def test_bytes_of_a_payload():
    assert manifest().anchor.bytes == 150


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (manifest(format=2), "format 2"),
        (manifest(version=5, base=3), "it says version 5"),
        (manifest(delta=None, anchor=None), "neither a delta nor an anchor"),
        (manifest(run="0" * 32), "another run"),
        (manifest(pruned=True), "pruned, but with a payload"),
        (manifest(base_digest=ONE), "sums of its pieces"),
        (anchored([piece(0, 0, 8, 0, 0, 20, total=ONE), *ANCHOR[1:]]), "sums of its pieces"),
        (changed([piece(0, 3, 6, 0, 0, 1)]), "crosses from one chunk into another"),
        (manifest(base=None), "a delta without an earlier base"),
        (manifest(base=4), "a delta without an earlier base"),
        (manifest(base=5), "a delta without an earlier base"),
        (changed(DELTA, [BlobRef(HASH, MAX_BLOB_BYTES + 1), BLOBS[1]]), "a blob of"),
        (changed([piece(3, 0, 1, 0, 0, 1)]), "a piece of tensor number 3 of 3"),
        (changed([piece(0, 0, 1, 2, 0, 1)]), "a piece in blob number 2 of 2"),
        (changed([piece(0, 0, 1, 1, 50, 1)]), "ends behind its blob"),
        (changed([piece(0, 0, 1, 0, 1 << 48, 1 << 48)]), "ends behind its blob"),
        (changed([piece(0, 20, 1, 0, 0, 1)]), "ends behind tensor a"),
        (changed([piece(0, 1 << 48, 1 << 48, 0, 0, 1)]), "ends behind tensor a"),
        (changed([piece(1, 0, 1, 0, 0, 1)]), "ends behind tensor none"),
        (changed([piece(0, 0, 4, 0, 0, 1), piece(0, 3, 4, 0, 0, 1)]), "tensor a overlap"),
        (changed([piece(0, 3, 4, 0, 0, 1), piece(0, 0, 4, 0, 0, 1)]), "tensor a overlap"),
        (changed([DELTA[0], DELTA[0]]), "tensor a overlap"),
        (anchored([ANCHOR[0], *ANCHOR]), "tensor a overlap"),
        (anchored(ANCHOR[3:]), "does not cover"),
        (anchored(ANCHOR[:4]), "does not cover"),
        (anchored([]), "does not cover"),
        (anchored([piece(0, 1, 7, 0, 0, 20), *ANCHOR[1:]]), "tensor a overlap or leave a gap"),
        (anchored([*ANCHOR[:2], piece(0, 16, 3, 0, 0, 20), *ANCHOR[3:]]), "does not cover"),
        (
            anchored([piece(0, 0, 7, 0, 0, 9), *ANCHOR[1:]]),
            "tensor a overlap or leave a gap",
        ),
    ],
)
def test_each_rule_broken_in_turn(value, reason):
    assert reason in refused(value)


def test_both_payloads_are_checked():
    bad = Payload(BLOBS, [piece(9, 0, 1, 0, 0, 1)], 1)
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
        {"run": "x" * 32},
        {"base_digest": ""},
        {"digest": "0" * 31},
        {"digest": "0" * 33},
        {"digest": "0" * 32 + "\n"},
        {"digest": "G" * 32},
        {"nonce": "n" * 65},
        {"created_at": "now"},
        {"metadata": []},
        {"delta": {"blobs": [], "pieces": []}},
        {"delta": {"blobs": [{"hash": HASH[:-1], "bytes": 1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": HASH + "\n", "bytes": 1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": "../" + HASH[3:], "bytes": 1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": HASH, "bytes": -1}], "pieces": [], "changed": 0}},
        {"delta": {"blobs": [{"hash": HASH, "bytes": 1}] * 65537, "pieces": [], "changed": 0}},
        {"delta": {"blobs": [], "pieces": [[0, 0, 1, 0, 0, 0, ZERO]], "changed": 0}},
        {"delta": {"blobs": [], "pieces": [[0, -1, 1, 0, 0, 0, ZERO, ZERO]], "changed": 0}},
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
    plain = msgspec.json.encode(manifest(metadata={}))
    data = plain.replace(b'"metadata":{}', b'"metadata":{"x":%s}' % deep)
    assert "nested too deeply" in refused(data)
    unknown = plain.replace(b"{", b'{"unknown":%s,' % deep, 1)
    assert "nested too deeply" in refused(unknown)
    assert "not a valid" in refused(deep)


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"{", b"\0" * 9, b"\xff", b'{"nonce":"\xff"}']
)
def test_bytes_that_are_no_manifest(data):
    assert "not a valid" in refused(data)


def test_a_cut_at_any_place_is_noticed():
    data = encode_json(manifest()).rstrip()
    for length in range(len(data)):
        refused(data[:length])


def test_version_0_is_the_runs():
    first = anchored(ANCHOR)
    value = msgspec.structs.replace(first, version=0, digest=ZERO)
    assert "run.json states" in refused(value, version=0)


def test_a_tombstone_holds_its_name_and_nothing_else():
    value = manifest(base=None, delta=None, anchor=None, pruned=True)
    assert decode(encode_json(value)).pruned
    assert "metadata has" in refused(manifest(metadata={"a": "b" * (1 << 20)}))
