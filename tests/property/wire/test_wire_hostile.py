"""Whatever bytes lie in a bucket, reading them is a value or a `CorruptError`, nothing else."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import CorruptError
from deltawire.testing.faulty import flip_bit
from deltawire.wire.manifest import Manifest, check_payload, decode_manifest, encode_manifest
from deltawire.wire.objects import decode_json, decode_packed
from deltawire.wire.payload import BlobRef, Payload, Piece
from deltawire.wire.piece_table import decode_table, encode_table, payload_ref
from deltawire.wire.run import Run, TensorSpec, decode_run, encode_run
from deltawire.wire.seal import seal_json
from deltawire.wire.status import Heartbeat, TrainerStatus

SPECS = [TensorSpec("a", (3, 4), "BF16"), TensorSpec("b", (2,), "F32")]
TABLE = Run(id="ab" * 16, name="r", created_at=1.0, tensors=SPECS, digest="0" * 32)
RUN = encode_run(TABLE)
SUMS = ("0" * 32, "0" * 32)
PAYLOAD = Payload(
    [BlobRef("ab" * 32, 9)], [Piece(0, 0, 12, 0, 0, 4, *SUMS), Piece(1, 0, 2, 0, 4, 5, *SUMS)]
)
REF = payload_ref(PAYLOAD, encode_table(PAYLOAD, TABLE))
MANIFEST = encode_manifest(
    Manifest(
        run=TABLE.id,
        version=2,
        base=1,
        delta=REF,
        anchor=REF,
        digest="0" * 32,
        epoch=1,
        nonce="n",
        created_at=1.0,
        metadata={"step": 1},
    )
)


def read_manifest(data):
    manifest = decode_manifest(data, version=2, table=TABLE, run="r", key="k")
    # A payload that was accepted is safe to use: every piece lies within its tensor and blob.
    for ref in manifest.payloads:
        payload = decode_table(ref.table.inline, ref, TABLE)
        check_payload(manifest, ref, payload, TABLE, run="r")
        for piece in payload.pieces:
            assert piece.start + piece.count <= SPECS[piece.tensor].count
            assert piece.offset + piece.length <= payload.blobs[piece.blob].bytes
    return manifest


def read_run(data):
    run = decode_run(data, run="r", key="k")
    assert len({spec.name for spec in run.tensors}) == len(run.tensors)
    return run


READERS = [
    read_manifest,
    read_run,
    lambda data: decode_json(data, TrainerStatus, run="r", key="k"),
    lambda data: decode_json(data, Heartbeat, run="r", key="k"),
    lambda data: decode_packed(data, Heartbeat, run="r", key="k"),
]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(READERS), st.binary(max_size=300))
def test_any_bytes(read, data):
    with suppress(CorruptError):
        read(data)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([(read_manifest, MANIFEST), (read_run, RUN)]),
    st.lists(st.integers(0, 8 * len(MANIFEST)), max_size=3),
    st.integers(0, len(MANIFEST)),
    st.binary(max_size=4),
    st.integers(0, 4),
)
def test_small_damage(which, flips, place, noise, removed):
    read, data = which
    for bit in flips:
        data = flip_bit(data, bit)
    data = data[:place] + noise + data[place + removed :]
    # Once unchanged, once with a valid seal, so that the checks after the seal run too.
    with suppress(CorruptError):
        read(data)
    if b"}" in data:
        data = seal_json(data[: data.rindex(b"}") + 1], key="k")
    with suppress(CorruptError):
        read(data)


def test_undamaged_they_are_read():
    assert read_manifest(MANIFEST).version == 2
    assert read_run(RUN).tensors == SPECS
