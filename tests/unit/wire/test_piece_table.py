"""Piece tables: what is encoded comes back, damage is an error, and large ones are small."""

import random

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import CorruptError
from deltawire.wire.manifest import MAX_MANIFEST_BYTES, Manifest, encode_manifest
from deltawire.wire.payload import INLINE_BYTES, BlobRef, Payload, Piece, add_sums, payload_fault
from deltawire.wire.piece_table import (
    SEGMENT_BLOBS,
    SEGMENT_PIECES,
    Segment,
    decode_blobs,
    decode_head,
    decode_page,
    decode_pieces,
    decode_table,
    encode_table,
    head_bytes,
    payload_ref,
    wanted,
)
from deltawire.wire.run import Run, TensorSpec

CHUNK = 16


def table_of(shapes):
    specs = [TensorSpec(f"t{number}", shape, "BF16") for number, shape in enumerate(shapes)]
    return Run(id="ab" * 16, name="r", created_at=0.0, tensors=specs, digest="0" * 32, chunk=CHUNK)


def payload_of(run, rng, *, share=1.0, blobs=3, cut=False):
    """Pieces of some chunks, in blobs in any order, each piece at the end of its blob so far."""
    pieces, sizes = [], [0] * blobs
    for number, spec in enumerate(run.tensors):
        for start in range(0, spec.count, run.chunk):
            if rng.random() > share:
                continue
            count = min(run.chunk, spec.count - start)
            first = rng.randrange(1, count) if cut and count > 1 else count
            for at, size in ((start, first), (start + first, count - first)):
                if size == 0:
                    continue
                blob, length = rng.randrange(blobs), rng.randrange(1, 1 << 20)
                gap = rng.choice([0, 0, 7])
                total, found = (f"{rng.getrandbits(128):032x}" for _ in range(2))
                pieces.append(
                    Piece(number, at, size, blob, sizes[blob] + gap, length, total, found)
                )
                sizes[blob] += gap + length
    return Payload([BlobRef(f"{rng.getrandbits(256):064x}", size) for size in sizes], pieces)


def of_table(encoded, part):
    """The bytes of a page or a segment."""
    return encoded[part.offset : part.offset + part.length]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([(), (0, 3), (5,), (4, 8), (100, 7)]), max_size=40),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([1, 3, 1500]),
    st.booleans(),
)
def test_tables_come_back(shapes, seed, share, blobs, cut):
    run = table_of(shapes)
    payload = payload_of(run, random.Random(seed), share=share, blobs=blobs, cut=cut)
    encoded = encode_table(payload, run)
    ref = payload_ref(payload, encoded)
    found = decode_table(encoded, ref, run)
    assert (found.blobs, found.pieces) == (payload.blobs, payload.pieces)
    assert bool(ref.table.inline) == (len(encoded) <= INLINE_BYTES)
    assert (ref.table.blob == "") == (ref.table_blob is None)
    total = add_sums(piece.sum for piece in payload.pieces)
    assert payload_fault(payload, run, base_digest="0" * 32, to=total) == ""


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.data())
def test_segments_only_hold_every_piece_of_a_part(seed, data):
    run = table_of([(40, CHUNK)] * 30)
    payload = payload_of(run, random.Random(seed), share=0.7, cut=True)
    encoded = encode_table(payload, run)
    ref = payload_ref(payload, encoded)
    head = decode_head(encoded[: head_bytes(ref)], ref)
    held = data.draw(st.dictionaries(st.integers(0, 29), st.integers(0, 39), max_size=5))
    ranges = {number: (first * CHUNK, (first + 1) * CHUNK) for number, first in held.items()}
    found = []
    segments = [
        segment
        for page in wanted(head.pages, ranges)
        for segment in wanted(decode_page(page, of_table(encoded, page)), ranges)
    ]
    for segment in segments:
        found += decode_pieces(segment, of_table(encoded, segment), run)

    def of_part(pieces):
        return [
            piece for piece in pieces if piece.tensor in ranges
            and ranges[piece.tensor][0] <= piece.start < ranges[piece.tensor][1]
        ]  # fmt: skip

    assert of_part(found) == of_part(payload.pieces)
    assert len(segments) <= 2 * max(len(ranges), 1)


def test_no_flip_in_a_table_in_a_blob_is_taken():
    run = table_of([(40, CHUNK)] * 30)
    payload = payload_of(run, random.Random(1))
    encoded = bytearray(encode_table(payload, run))
    ref = payload_ref(payload, bytes(encoded))
    assert ref.table.blob
    for at in range(0, len(encoded), 97):
        encoded[at] ^= 0x10
        with pytest.raises(CorruptError):
            decode_table(bytes(encoded), ref, run)
        encoded[at] ^= 0x10
    for size in (0, 11, head_bytes(ref), len(encoded) - 1):
        with pytest.raises(CorruptError):
            decode_table(bytes(encoded[:size]), ref, run)
    with pytest.raises(CorruptError):
        decode_table(bytes(encoded) + b"\0", ref, run)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.integers(1, 6))
def test_any_bytes_as_pieces_end_in_pieces_or_an_error(data, count):
    """Hostile tables have hashes that fit: the writer of the table made them."""
    run = table_of([(3, 4), (0, 1), (9,)])
    segment = Segment(0, len(data), blake3(data).digest(16), count)
    try:
        pieces = decode_pieces(segment, data, run)
    except CorruptError:
        return
    assert len(pieces) == count


def test_a_blob_segment_of_another_hash_is_refused():
    run = table_of([(4, CHUNK)])
    payload = payload_of(run, random.Random(3))
    encoded = encode_table(payload, run)
    ref = payload_ref(payload, encoded)
    (segment,) = decode_head(encoded[: head_bytes(ref)], ref).blob_segments
    data = encoded[segment.offset :]
    assert decode_blobs(segment, data) == payload.blobs
    with pytest.raises(CorruptError, match="does not match its hash"):
        decode_blobs(segment, data[:-1] + b"\xff")


LAYERS, OF_A_LAYER = 64, 1 << 10


def trillion(blobs):
    """2^18 pieces of 2^22 elements, in 2^16 tensors of 64 layers: a run and a payload."""
    specs = [
        TensorSpec(f"model.layers.{layer}.experts.{n}.weight", (1 << 24,), "U8")
        for layer in range(LAYERS)
        for n in range(OF_A_LAYER)
    ]
    run = Run(id="ab" * 16, name="r", created_at=0.0, tensors=specs, digest="0" * 32, chunk=1 << 22)
    rng = random.Random(5)
    names = [BlobRef(f"{rng.getrandbits(256):064x}", 1 << 36) for _ in range(blobs)]
    offsets = [0] * blobs
    pieces = []
    for number in range(1 << 18):
        blob, length = number * blobs >> 18, rng.randrange(3_000_000, 4_300_000)
        total, found = (f"{rng.getrandbits(128):032x}" for _ in range(2))
        place = (number // 4, number % 4 << 22, 1 << 22)
        pieces.append(Piece(*place, blob, offsets[blob], length, total, found))
        offsets[blob] += length
    return run, Payload(names, pieces)


def fetched(encoded, ref, run, ranges):
    """How many bytes of a table a reader of ``ranges`` fetches, and in how many segments."""
    head = decode_head(encoded[: head_bytes(ref)], ref)
    pages = wanted(head.pages, ranges)
    segments = [
        segment
        for page in pages
        for segment in wanted(decode_page(page, of_table(encoded, page)), ranges)
    ]
    pieces = [p for s in segments for p in decode_pieces(s, of_table(encoded, s), run)]
    blobs = {piece.blob // SEGMENT_BLOBS for piece in pieces}
    listed = [head.blob_segments[number] for number in blobs]
    size = head_bytes(ref) + sum(each.length for each in (*pages, *segments, *listed))
    return size, len(segments)


@pytest.mark.parametrize("blobs", [4096, 96])
def test_a_trillion_parameters(blobs):
    """The manifest, the table, and readers of a sixteenth: contiguous, and of each layer."""
    run, payload = trillion(blobs)
    encoded = encode_table(payload, run)
    ref = payload_ref(payload, encoded)
    manifest = Manifest(
        run="a" * 32, version=50, base=49, base_digest="f" * 32, delta=ref, anchor=ref,
        digest="f" * 32, epoch=1, nonce="x" * 32, created_at=0.0,
    )  # fmt: skip
    root = len(encode_manifest(manifest))
    assert root < 64 << 10 < MAX_MANIFEST_BYTES
    assert root + len(encoded) < 10_000_000
    sixteenth = OF_A_LAYER // 16
    contiguous = dict.fromkeys(range(20_007, 20_007 + LAYERS * sixteenth), (0, 1 << 24))
    size, segments = fetched(encoded, ref, run, contiguous)
    assert root + size < 800_000
    assert segments <= (1 << 14) // SEGMENT_PIECES + 1
    experts = dict.fromkeys(
        (
            layer * OF_A_LAYER + 11 * layer + n  # A layer's first expert is nowhere aligned.
            for layer in range(LAYERS)
            for n in range(sixteenth)
        ),
        (0, 1 << 24),
    )
    size, segments = fetched(encoded, ref, run, experts)
    assert root + size < 800_000
    assert segments <= (1 << 14) // SEGMENT_PIECES + LAYERS


def test_a_page_that_its_entry_does_not_match_is_refused():
    run = table_of([(700, CHUNK)])
    payload = payload_of(run, random.Random(4))
    encoded = encode_table(payload, run)
    ref = payload_ref(payload, encoded)
    pages = decode_head(encoded[: head_bytes(ref)], ref).pages
    assert len(pages) == 2
    for page in pages:
        data = of_table(encoded, page)
        assert len(decode_page(page, data)) == page.records
        for other in (
            page._replace(first=(page.first[0], page.first[1] + 1)),
            page._replace(body_length=page.body_length + 1),
            page._replace(hash=bytes(16)),
        ):
            with pytest.raises(CorruptError, match="does not match"):
                decode_page(other, data)


def test_the_largest_inline_tables_leave_a_root_of_64_kib():
    run = table_of([(100, CHUNK)] * 3)
    payload = payload_of(run, random.Random(2))
    ref = payload_ref(payload, encode_table(payload, run))
    table = msgspec.structs.replace(ref.table, inline=bytes(INLINE_BYTES))
    full = msgspec.structs.replace(ref, table=table)
    manifest = Manifest(
        run="a" * 32, version=50, base=49, base_digest="f" * 32, delta=full, anchor=full,
        digest="f" * 32, epoch=1, nonce="x" * 64, created_at=1e9 / 3,
    )  # fmt: skip
    assert len(encode_manifest(manifest)) < 48 << 10
