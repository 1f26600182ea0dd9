"""Filling a mirror: from nothing, or from an older version, to the one that is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import msgspec
import numpy as np

from deltawire import codec
from deltawire.errors import CorruptError, ResyncError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import newest_version, with_retries
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.routes import Edge
from deltawire.sync.follow.fetch import decode_anchor, decode_delta
from deltawire.sync.follow.mirror import Bits, Mirror, PiecePatch, empty_mirror, select
from deltawire.wire.manifest import CompactedDelta, Manifest, Payload
from deltawire.wire.run import Run

MAX_REPLANS = 64
"""So many damaged or missing objects are got around before giving up."""


def load_mirror(
    bucket: Bucket,
    run: Run,
    *,
    at: int | None = None,
    wanted: Mapping[str, tuple[int, int] | None] | Iterable[str] | None = None,
    into: Mirror | None = None,
    resume: bool = False,
    threads: int | None = None,
) -> Mirror | None:
    """The mirror at version ``at`` (the newest if None), by the fewest bytes.

    ``wanted`` names tensors, or rows of them, for a reader that wants no more (see `select`).
    ``into`` is a mirror to be filled or moved forward instead of a new one; with ``resume``, what
    it holds of an anchor already, by its digest, is not fetched. None if nothing is committed yet.
    What is damaged is got around if anything leads around it; raises `CorruptError` naming the
    first such object when no way is left, and `RetryError` if the store does not answer, though it
    was asked again (`with_retries`).
    """
    target = with_retries(lambda: newest_version(bucket)) if at is None else at
    if target is None:
        return None
    mirror = empty_mirror(run, select(run, wanted)) if into is None else into
    held = mirror.version if 0 <= mirror.version <= target else None
    survey = RouteFinder(bucket, run, mirror, held, target)
    for _ in range(MAX_REPLANS):
        survey.held = held
        route = with_retries(survey.find)
        if route is None:
            break
        for edge in route.edges:
            try:
                with_retries(partial(_take, bucket, run, survey, edge, mirror, threads, resume))
            except CorruptError as error:
                survey.ban(edge, error)
                held = mirror.version if mirror.version >= 0 else None
                break
            held = mirror.version
        else:
            return mirror
    raise survey.error()


def _take(
    bucket: Bucket,
    run: Run,
    survey: RouteFinder,
    edge: Edge,
    mirror: Mirror,
    threads: int | None,
    resume: bool,
) -> None:
    step, payload = survey.step(edge)
    if edge.kind == "anchor":
        fetch_anchor(bucket, run, step, payload, mirror, threads=threads, resume=resume)
        return
    pieces, held = decode_delta(bucket, run, step, payload, mirror, threads=threads)
    mirror.move(pieces, step.version, codec.Digest.from_hex(step.digest), held)


def fetch_anchor(
    bucket: Bucket,
    run: Run,
    step: Manifest | CompactedDelta,
    payload: Payload | None,
    mirror: Mirror,
    *,
    threads: int | None = None,
    resume: bool = False,
) -> None:
    """Fill ``mirror`` from an anchor, verified. Raises `CorruptError`; it then holds nothing.

    With ``resume``, pieces whose elements have the digest that the anchor states are not fetched.
    """
    if payload is None:
        raise ResyncError("not an anchor", run=bucket.url, version=step.version)
    mirror.begin()
    kept = codec.ZERO
    if resume:
        payload, kept = _missing(run, payload, mirror)
    held = decode_anchor(bucket, run, step, payload, mirror, None, threads=threads)
    mirror.finish(step.version, codec.Digest.from_hex(step.digest), kept + held)


def _missing(run: Run, payload: Payload, mirror: Mirror) -> tuple[Payload, codec.Digest]:
    """An anchor without the pieces that ``mirror`` holds, and the digest of those."""
    missing, kept = [], codec.ZERO
    for piece in payload.pieces:
        name = run.tensors[piece.tensor].name
        bits = mirror.find(name, piece.start, piece.count)
        if bits is None:
            continue
        found = codec.digest_bits(name, bits, piece.start)
        if found.hex() == piece.sum:
            kept += found
        else:
            missing.append(piece)
    return msgspec.structs.replace(payload, pieces=missing), kept


def jump(
    bucket: Bucket,
    run: Run,
    step: Manifest | CompactedDelta,
    payload: Payload,
    mirror: Mirror,
    *,
    threads: int | None = None,
) -> tuple[list[PiecePatch], codec.Digest]:
    """What an anchor changes in what ``mirror`` holds, and the digest of the result. Changes
    nothing; raises `CorruptError`."""
    pieces: list[PiecePatch] = []

    def take(name: str, start: int, bits: Bits) -> None:
        pieces.append(difference(name, start, mirror, bits))

    held = decode_anchor(bucket, run, step, payload, mirror, take, threads=threads)
    return [piece for piece in pieces if len(piece.positions)], held


def difference(name: str, start: int, mirror: Mirror, bits: Bits) -> PiecePatch:
    """What turns the mirror's elements from ``start`` on into ``bits``."""
    old = mirror.find(name, start, bits.size)
    assert old is not None
    positions = np.flatnonzero(old != bits)
    return PiecePatch(name, start, positions.astype(np.uint32), bits[positions])
