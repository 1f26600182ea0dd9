"""A manifest is believed only if every one of its rules holds."""

import msgspec
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.manifest import Manifest, check_payload, decode_manifest
from deltawire.wire.payload import MAX_BLOB_BYTES, BlobRef, Payload, Piece
from deltawire.wire.piece_table import decode_table, encode_table, payload_ref, table_above
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
    piece(2, 0, 1, 1, 0, 50),
]
DELTA = [piece(0, 3, 4, 0, 0, 100), piece(2, 0, 1, 1, 10, 40)]


def encode_json(value):
    """As it lies in the bucket."""
    return seal_json(msgspec.json.encode(value), key="the/key")


def stated(pieces, blobs=BLOBS):
    """How a manifest states a payload."""
    payload = Payload(blobs, pieces)
    return payload_ref(payload, encode_table(payload, TABLE))


def manifest(**changes):
    fields = {
        "run": TABLE.id,
        "version": 4,
        "base": 3,
        "delta": stated(DELTA),
        "anchor": stated(ANCHOR),
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


@pytest.mark.parametrize(
    "value",
    [
        manifest(),
        manifest(anchor=None),
        manifest(base=None, delta=None),
        manifest(delta=stated([], [])),
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
        (manifest(version=5, base=3), "it says version 5"),
        (manifest(delta=None, anchor=None, base=None), "neither a delta nor an anchor"),
        (manifest(run="0" * 32), "another run"),
        (manifest(pruned=True), "pruned, but with a payload"),
        (manifest(base=None), "a delta without an earlier base"),
        (manifest(base=4), "a delta without an earlier base"),
        (manifest(base=5), "a delta without an earlier base"),
        (manifest(delta=None), "a base without a delta"),
    ],
)
def test_each_rule_broken_in_turn(value, reason):
    assert reason in refused(value)


def test_another_format_and_none_are_refused():
    data = msgspec.json.encode(manifest())
    assert "reads format 1" in refused(data.replace(b'"format":1', b'"format":2', 1))
    assert "`format`" in refused(data.replace(b'"format":1,', b"", 1))


@pytest.mark.parametrize(
    "twice", [b'"version":4', b'"delta":{"bytes":1,"bytes":2}', b'"x":[{"y":[{"a":1,"a":1}]}]']
)
def test_a_member_stated_twice_is_refused(twice):
    data = msgspec.json.encode(manifest(anchor=None))
    assert "twice" in refused(data.replace(b"{", b"{%s," % twice, 1))


def test_null_is_absent_where_nothing_is_the_default_and_refused_elsewhere():
    data = msgspec.json.encode(manifest(delta=None, base=None))
    assert decode(seal_json(data.replace(b"{", b'{"delta":null,', 1), key="k")).delta is None
    for member in ("pruned", "base_digest", "line"):
        assert "not a valid" in refused(data.replace(b"{", b'{"%s":null,' % member.encode(), 1))


def test_a_version_of_another_line_is_refused():
    data = msgspec.json.encode(manifest())
    assert "not a valid" in refused(data.replace(b"{", b'{"line":"canary",', 1))


def test_an_unknown_codec_is_one_error_that_names_the_release():
    ref = msgspec.structs.replace(manifest().delta, codec="dw9", codec_since="9.1")
    text = refused(manifest(delta=ref))
    assert "'dw9'" in text
    assert "deltawire 9.1 or newer" in text


def test_a_table_of_the_run_above_is_not_inline():
    ref = manifest().delta
    data = seal_json(msgspec.json.encode(manifest(delta=table_above(ref))), key="the/key")
    read = decode_manifest(data, version=4, table=TABLE, run="s3://b", key="the/key")
    assert read.delta.table_blob.bytes == len(ref.table.inline)
    inline = msgspec.structs.replace(ref, codec="dw1-fork")
    assert "although it is that of the run above" in refused(manifest(delta=inline))


def check(pieces, blobs=BLOBS, *, whole=False, **changes):
    """Returns a reader's error for a payload that it has read, "" if there is none."""
    value = manifest(**({"base": None, "delta": None} if whole else {"anchor": None}), **changes)
    ref = value.anchor if whole else value.delta
    try:
        check_payload(value, ref, Payload(blobs, pieces), TABLE, run="s3://b")
    except CorruptError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (ANCHOR, True),
        ([piece(0, 0, 6, 0, 0, 9), piece(0, 6, 2, 1, 0, 9), *ANCHOR[1:]], True),
        ([piece(0, 0, 3, 0, 0, 1), piece(0, 3, 5, 0, 0, 1)], False),
        (DELTA, False),
        ([], False),
    ],
)
def test_good_payloads(pieces, whole):
    assert check(pieces, whole=whole) == ""
    ref = stated(pieces)
    assert list(decode_table(ref.table.inline, ref, TABLE).pieces) == pieces


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([piece(0, 3, 6, 0, 0, 1)], "crosses from one chunk into another"),
        ([piece(3, 0, 1, 0, 0, 1)], "a piece of tensor number 3 of 3"),
        ([piece(0, 0, 1, 2, 0, 1)], "a piece in blob number 2 of 2"),
        ([piece(0, 0, 1, 1, 50, 1)], "ends after its blob"),
        ([piece(0, 0, 1, 0, 1 << 48, 1 << 48)], "ends after its blob"),
        ([piece(0, 20, 1, 0, 0, 1)], "ends after tensor a"),
        ([piece(0, 1 << 48, 1 << 48, 0, 0, 1)], "ends after tensor a"),
        ([piece(1, 0, 1, 0, 0, 1)], "ends after tensor none"),
        ([piece(1, 0, 0, 0, 0, 1)], "an empty piece of tensor none"),
        ([piece(0, 0, 0, 0, 0, 1)], "an empty piece of tensor a"),
        ([piece(0, 0, 4, 0, 0, 0)], "an empty piece of tensor a"),
        ([piece(0, 0, 4, 0, 0, 1), piece(0, 3, 4, 0, 0, 1)], "tensor a overlap"),
        ([piece(0, 3, 4, 0, 0, 1), piece(0, 0, 3, 0, 0, 1)], "do not ascend"),
        ([DELTA[1], DELTA[0]], "do not ascend"),
        ([DELTA[0], DELTA[0]], "tensor a overlap"),
        ([piece(0, 3, 4, 0, 0, 1, total=ONE)], "sums of its pieces"),
    ],
)
def test_each_rule_of_pieces_broken_in_turn(pieces, reason):
    assert reason in check(pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        ANCHOR[3:],
        ANCHOR[:3],
        [],
        [piece(0, 1, 7, 0, 0, 20), *ANCHOR[1:]],
        [*ANCHOR[:2], piece(0, 16, 3, 0, 0, 20), *ANCHOR[3:]],
    ],
)
def test_an_anchor_that_leaves_something_out(pieces):
    assert "does not cover" in check(pieces, whole=True)


def test_sums_must_lead_from_the_base_to_the_version():
    assert "sums of its pieces" in check(DELTA, base_digest=ONE)
    assert check(DELTA, base_digest=ONE, digest=ONE) == ""
    assert "sums of its pieces" in check(ANCHOR, whole=True, digest=ONE)
    assert "a blob of" in check(DELTA, [BlobRef(HASH, MAX_BLOB_BYTES + 1), BLOBS[1]])


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
        {"delta": {"bytes": 1}},
        {"delta": {"bytes": -1, "table": {"pieces": 0, "blobs": 0}}},
        {"delta": {"bytes": 1, "table": {"pieces": (1 << 20) + 1, "blobs": 0}}},
        {"delta": {"bytes": 1, "table": {"pieces": 0, "blobs": (1 << 18) + 1}}},
        {"delta": {"bytes": 1, "table": {"pieces": 1, "blobs": 1, "blob": "../" + HASH[3:]}}},
        {"delta": {"bytes": 1, "table": {"pieces": 1, "blobs": 1, "blob": HASH + "\n"}}},
        {"delta": {"bytes": 1, "table": {"pieces": 1, "blobs": 1, "inline": "?"}}},
        {"delta": {"bytes": 1, "table": {"pieces": 1, "blobs": 1, "inline": "A" * 20_000}}},
        {"delta": {"bytes": 1, "table": {"pieces": 1, "blobs": 1, "head": "x" * 32}}},
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
    data = plain.replace(b"{", b'{"metadata":{"x":%s},' % deep, 1)
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
    value = manifest(base=None, delta=None, version=0, digest=ZERO)
    assert "run.json states" in refused(value, version=0)


def test_a_tombstone_holds_its_name_and_nothing_else():
    value = manifest(base=None, delta=None, anchor=None, pruned=True)
    assert decode(encode_json(value)).pruned
    assert "metadata has" in refused(manifest(metadata={"a": "b" * (1 << 20)}))
