"""Reads and stores payloads: the piece tables of manifests and compacted deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import get_blob, put_blob
from deltawire.wire import keys
from deltawire.wire.coordination import Part
from deltawire.wire.manifest import CompactedDelta, Manifest, check_payload
from deltawire.wire.payload import BlobRef, Payload, PayloadRef, pieces_fault, too_many
from deltawire.wire.piece_table import (
    SEGMENT_BLOBS,
    Head,
    Page,
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
from deltawire.wire.run import Run

Stated = Manifest | CompactedDelta
_Part = TypeVar("_Part", Page, Segment)


class DamagedTableError(CorruptError):
    """A piece table is missing or damaged, so its version cannot be read."""


WHOLE = 0.5
"""Readers that need a larger share of a table's bytes than this fetch all of it."""


def store_payload(bucket: Bucket, run: Run, payload: Payload, *, version: int) -> PayloadRef:
    """Stores a payload's piece table unless it is inline, and returns the reference for the
    manifest.

    Raises `InputError` for a payload that exceeds the readers' limits, `RetryError` if the store
    does not answer.
    """
    if fault := too_many(payload):
        raise InputError(
            f"no reader would accept this version: {fault}",
            hint="start a run with larger chunks, or publish from fewer ranks",
            run=bucket.url,
            version=version,
        )
    encoded = encode_table(payload, run)
    ref = payload_ref(payload, encoded)
    if not ref.table.inline:
        put_blob(bucket, encoded)
    return ref


def read_payload(
    bucket: Bucket,
    run: Run,
    stated: Stated,
    ref: PayloadRef,
    ranges: Mapping[int, tuple[int, int]] | None = None,
) -> Payload:
    """Reads and checks a payload of ``stated``.

    ``ranges`` maps tensor numbers to the first element and the one after the last, at chunk
    boundaries. With it, the result holds at least the pieces in these ranges, read from the table
    segments that list them. Raises `CorruptError` if the table is missing, damaged, or of another
    run.
    """
    try:
        if ranges is not None and not ref.table.inline:
            payload = _read_part(bucket, run, ref, ranges)
            if payload is not None:
                if fault := pieces_fault(payload, run):
                    raise CorruptError(f"payload: {fault}")
                return payload
        payload = read_table(bucket, run, ref)
    except CorruptError as error:
        raise _placed(error, bucket, stated.version, ref) from error
    check_payload(stated, ref, payload, run, run=bucket.url)
    return payload


def read_table(bucket: Bucket, run: Run, ref: PayloadRef) -> Payload:
    """Reads a payload's whole piece table without checking its positions and sums; raises
    `CorruptError`."""
    blob = ref.table_blob
    data = ref.table.inline if blob is None else bytes(get_blob(bucket, blob))
    return decode_table(data, ref, run)


def read_blobs(bucket: Bucket, run: Run, ref: PayloadRef) -> list[BlobRef]:
    """Reads the list of a payload's blobs from the head and last segments of its table; raises
    `CorruptError`."""
    if ref.table.inline:
        return list(read_table(bucket, run, ref).blobs)
    head = _head(bucket, ref)
    return [
        blob
        for segment, data in _read(bucket, ref, head.blob_segments)
        for blob in decode_blobs(segment, data)
    ]


def all_blobs(bucket: Bucket, run: Run, stated: Stated | Part) -> list[BlobRef]:
    """Lists every blob that the payloads of ``stated`` need, their piece tables first.

    Raises `CorruptError`.
    """
    found: list[BlobRef] = []
    for ref in stated.payloads:
        found += table_blobs([ref])
        try:
            found += read_blobs(bucket, run, ref)
        except CorruptError as error:
            raise _placed(error, bucket, stated.version, ref) from error
    return found


def table_blobs(refs: Sequence[PayloadRef]) -> list[BlobRef]:
    """Returns the blobs of the piece tables that are not inline."""
    return [ref.table_blob for ref in refs if ref.table_blob is not None]


def _read_part(
    bucket: Bucket, run: Run, ref: PayloadRef, ranges: Mapping[int, tuple[int, int]]
) -> Payload | None:
    """Reads the table segments that ``ranges`` need and renumbers their blobs from 0; returns None
    if reading the whole table is cheaper."""
    head = _head(bucket, ref)
    segments = [
        segment
        for page, data in _read(bucket, ref, wanted(head.pages, ranges))
        for segment in wanted(decode_page(page, data), ranges)
    ]
    if sum(segment.length for segment in segments) > WHOLE * ref.table.bytes:
        return None
    pieces = [
        piece
        for segment, data in _read(bucket, ref, segments)
        for piece in decode_pieces(segment, data, run)
    ]
    numbers = sorted({piece.blob for piece in pieces})
    if numbers and numbers[-1] >= head.blobs:
        raise CorruptError("a piece is in a blob that the table does not list")
    groups = sorted({number // SEGMENT_BLOBS for number in numbers})
    parts = _read(bucket, ref, [head.blob_segments[group] for group in groups])
    listed = {
        group: decode_blobs(segment, data)
        for group, (segment, data) in zip(groups, parts, strict=True)
    }
    places = {number: place for place, number in enumerate(numbers)}
    blobs = [listed[number // SEGMENT_BLOBS][number % SEGMENT_BLOBS] for number in numbers]
    return Payload(blobs, [msgspec.structs.replace(p, blob=places[p.blob]) for p in pieces])


def _head(bucket: Bucket, ref: PayloadRef) -> Head:
    (data,) = _ranges(bucket, ref, [(0, head_bytes(ref))])
    return decode_head(data, ref)


def _read(
    bucket: Bucket, ref: PayloadRef, segments: Sequence[_Part]
) -> list[tuple[_Part, memoryview]]:
    """Reads segments or pages of a table, each with its bytes."""
    parts = _ranges(bucket, ref, [(segment.offset, segment.length) for segment in segments])
    return list(zip(segments, parts, strict=True))


def _ranges(bucket: Bucket, ref: PayloadRef, ranges: list[tuple[int, int]]) -> list[memoryview]:
    if not ranges:
        return []
    parts = bucket.read_ranges(keys.blob(ref.table.blob), ranges)
    if parts is None:
        raise CorruptError("a piece table is missing")
    return list(parts)


def _placed(
    error: CorruptError, bucket: Bucket, version: int | None, ref: PayloadRef
) -> DamagedTableError:
    key = keys.blob(ref.table.blob) if ref.table.blob else ""
    return DamagedTableError(
        error.message, hint=error.hint, run=bucket.url, version=version, key=error.key or key
    )
