"""Loads a version into a mirror, from nothing or from the version that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import msgspec
import numpy as np

from deltawire import codec
from deltawire.errors import CorruptError, ResyncError, RetryError
from deltawire.store import Bucket
from deltawire.store.bucket import require_bucket
from deltawire.sync.chain.objects import MissingBlobError, read_manifest
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.routes import Edge, Route
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.sync.follow.fetch import decode_anchor, decode_delta, read_for
from deltawire.sync.follow.mirror import Bits, Mirror, PiecePatch, empty_mirror, select
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.payload import Payload, PayloadRef
from deltawire.wire.run import Run

MAX_REPLANS = 64
"""The number of damaged or missing objects that a reader plans around before it gives up."""


def load_mirror(
    bucket: Bucket,
    run: Run,
    *,
    at: int | None = None,
    wanted: Mapping[str, tuple[int, int] | None] | Iterable[str] | None = None,
    into: Mirror | None = None,
    resume: bool = False,
    threads: int | None = None,
    known: Manifest | None = None,
) -> Mirror:
    """Loads version ``at``, or the newest one that can be read if ``at`` is None, by the fewest
    bytes.

    ``wanted`` names tensors, or rows of them, for a reader that wants only those (see `select`).
    ``into`` is a mirror to fill or move forward instead of a new one; its content is first compared
    with its version's manifest, and loaded again if the two differ. With ``resume``, pieces of an
    anchor that it already holds, by their digests, are not fetched. ``known`` is the manifest of
    ``at``, or of the newest version, if the caller has just read it.

    Plans around damaged and missing objects. Without ``at``, falls back to an older version if no
    route leads to the newest. Raises `CorruptError` naming the first such object when no route is
    left, `ResyncError` if ``at`` is None and the mirror is newer than everything that can be read,
    and `RetryError` if no version is published yet or the store does not answer.

    Example::

        bucket = open_bucket("s3://bucket/run")
        mirror = load_mirror(bucket, read_run(bucket))
        mirror.version, mirror.tensors["norm"]
    """
    require_bucket(bucket)
    if known is None and at is None:
        known = newest_readable(bucket, run)
        if known is None:
            raise RetryError("no version is published yet", run=bucket.url)
    target = at if known is None else known.version
    assert target is not None
    assert at is None or at == target
    mirror = empty_mirror(run, select(run, wanted)) if into is None else into
    if at is None and mirror.version > target:
        raise ResyncError(
            f"the mirror holds version {mirror.version}, newer than any that can be read",
            hint=f"was the run set back? load version {target} by its number to return to it",
            run=bucket.url,
            version=target,
        )
    exact = at is not None
    fill = partial(_fill, bucket, run, mirror, target, known, threads, exact=exact, resume=resume)
    try:
        return fill()
    except MissingBlobError as error:
        if not error.is_over(bucket):
            raise
        return fill()


def _fill(
    bucket: Bucket,
    run: Run,
    mirror: Mirror,
    target: int,
    known: Manifest | None,
    threads: int | None,
    *,
    exact: bool,
    resume: bool,
) -> Mirror:
    """Moves ``mirror`` to ``target``, or unless it must be ``exact``, to the newest version that a
    route leads to; raises `CorruptError` if there is none."""
    finder = RouteFinder(bucket, run, held=None, goal=target)
    if known is not None:
        finder.know(known)
    if 0 <= mirror.version <= target and holds_its_version(finder, mirror):
        finder.held = mirror.version
    for _ in range(MAX_REPLANS):
        route = finder.find()
        if route is None and not exact:
            route = finder.find_newest(newer_than=-1 if finder.held is None else finder.held)
        if route is None:
            break
        if _follow(finder, route, mirror, threads, resume=resume):
            return mirror
    if not exact and finder.held is not None:
        return mirror
    raise finder.error()


def holds_its_version(finder: RouteFinder, mirror: Mirror) -> bool:
    """Returns whether the mirror's digest is the one that its version's manifest states.

    A pruned version still states its digest. If the manifest is missing or damaged, the next delta
    decides: it states the digest of its base.
    """
    try:
        manifest = read_manifest(finder.bucket, finder.run, mirror.version)
    except CorruptError:
        return True
    return manifest is None or manifest.digest == mirror.digest.hex()


def _follow(
    finder: RouteFinder, route: Route, mirror: Mirror, threads: int | None, *, resume: bool
) -> bool:
    """Moves the mirror along a route. Returns False if an edge is damaged, and bans that edge."""
    for edge in route.edges:
        try:
            _move(finder, edge, mirror, threads, resume=resume)
        except CorruptError as error:
            finder.ban(edge, error)
            finder.held = mirror.version if mirror.version >= 0 else None
            return False
        finder.held = mirror.version
    return True


def _move(
    finder: RouteFinder, edge: Edge, mirror: Mirror, threads: int | None, *, resume: bool
) -> None:
    bucket, run = finder.bucket, finder.run
    step, payload = finder.step(edge)
    if edge.kind == "anchor":
        fetch_anchor(bucket, run, step, payload, mirror, threads=threads, resume=resume)
        return
    pieces, held = decode_delta(bucket, run, step, payload, mirror, threads=threads)
    mirror.move(pieces, step.version, codec.Digest.from_hex(step.digest), held)


def fetch_anchor(
    bucket: Bucket,
    run: Run,
    step: Manifest | CompactedDelta,
    ref: PayloadRef | None,
    mirror: Mirror,
    *,
    threads: int | None = None,
    resume: bool = False,
) -> None:
    """Fills ``mirror`` from an anchor and verifies it. Raises `CorruptError`; the mirror then holds
    no version.

    With ``resume``, pieces whose elements have the digest that the anchor states are not fetched.
    """
    if ref is None:
        raise ResyncError(
            "the version is not an anchor",
            hint="load it with load_mirror",
            run=bucket.url,
            version=step.version,
        )
    payload = read_for(bucket, run, step, ref, mirror)
    mirror.begin()
    kept = codec.ZERO
    if resume:
        payload, kept = _missing(run, payload, mirror)
    held = decode_anchor(bucket, run, step, payload, mirror, None, threads=threads)
    mirror.finish(step.version, codec.Digest.from_hex(step.digest), kept + held)


def _missing(run: Run, payload: Payload, mirror: Mirror) -> tuple[Payload, codec.Digest]:
    """Returns an anchor without the pieces that ``mirror`` already holds, and the digest of those
    pieces.
    """
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
    ref: PayloadRef,
    mirror: Mirror,
    *,
    threads: int | None = None,
) -> tuple[list[PiecePatch], codec.Digest]:
    """Returns the changes from ``mirror`` to an anchor, and the digest of the result. Changes
    nothing; raises `CorruptError`.
    """
    pieces: list[PiecePatch] = []

    def compare(name: str, start: int, bits: Bits) -> None:
        pieces.append(difference(name, start, mirror, bits))

    payload = read_for(bucket, run, step, ref, mirror)
    held = decode_anchor(bucket, run, step, payload, mirror, compare, threads=threads)
    return [piece for piece in pieces if len(piece.positions)], held


def difference(name: str, start: int, mirror: Mirror, bits: Bits) -> PiecePatch:
    """Returns the patch that turns the mirror's elements from ``start`` on into ``bits``."""
    old = mirror.find(name, start, bits.size)
    assert old is not None
    positions = np.flatnonzero(old != bits)
    return PiecePatch(name, start, positions.astype(np.uint32), bits[positions])


def differences(mirror: Mirror, other: Mirror, chunk: int) -> Iterator[PiecePatch]:
    """Yields the patches that turn ``mirror`` into ``other``, at most ``chunk`` elements each."""
    for name, bits in other.tensors.items():
        first = other.starts.get(name, 0)
        for at in range(0, bits.size, chunk):
            found = difference(name, first + at, mirror, bits[at : at + chunk])
            if len(found.positions):
                yield found
