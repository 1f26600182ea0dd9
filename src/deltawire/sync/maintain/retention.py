"""Retention: takes old versions away without ever forking the chain or stranding a reader.

In this order, so that stopping anywhere does no harm and the same call goes on from there:

1. Find the newest anchor at or before the cutoff that is there, and from which the newest version
   can be reached. If there is none, nothing happens.
2. Raise the boundary to it: create ``weights/retention-floors/<version>.json``. Publishers look at
   the floors after each commit and stop if theirs lies below one. Boundaries are created only, so
   that two retentions at once cannot lower it.
3. Below the newest boundary that is older than the grace period: put a tombstone in the place of
   each manifest, and one where a manifest is missing. The name of a committed version is so never
   free again, and a writer that was stalled all the while cannot commit under it.
4. Delete folds that begin below it, then boundaries below it.
5. Delete blobs that nothing refers to and that are older than the grace period: say which (see
   `sweeps`), look at manifests and folds once more, delete. And parts of commits that were never
   made.

Readers that planned before step 2 have the grace period to fetch what they planned; later ones
find the tombstone of their next version and plan anew. Writers need no grace: what one of them
commits behind the second look of step 5 it looks after itself. Ages are the store's own, measured
against an object written for the purpose: no two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from deltawire.codec import ZERO
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    check_signer,
    newest_version,
    read_compacted_delta,
    read_manifest,
    with_retries,
)
from deltawire.sync.chain.payloads import all_blobs, read_blobs, table_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.maintain.gc_intents import delete_blobs, drop_dead_sweeps, store_clock
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.manifest import CompactedDelta, Manifest, encode_manifest
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

GRACE_S = 24 * 3600.0
"""How long a reader may take to fetch what it planned, if nothing else is said."""


@dataclass
class Pruned:
    """What retention did. ``anchor`` is the version it hangs on, None if it found none; versions
    below ``boundary`` are closed, those below ``swept`` gone."""

    anchor: int | None = None
    boundary: int = 0
    swept: int = 0
    manifests: list[int] = field(default_factory=list)
    folds: list[str] = field(default_factory=list)
    blobs: list[str] = field(default_factory=list)
    bytes: int = 0


def prune(
    bucket: Bucket,
    run: Run,
    *,
    cutoff: int,
    grace_s: float = GRACE_S,
    signer: Signer | None = None,
    dry_run: bool = False,
    tombstones: Callable[[int], bytes | None] | None = None,
) -> Pruned:
    """Close the versions that are not needed to read version ``cutoff`` or a newer one, and take
    away those that were closed longer than ``grace_s`` ago.

    Versions that a checkpoint of the trainer stands on are kept. A relay has no key, and gives the
    ``tombstones`` of the bucket that it follows: the bytes for a version, None if that is not
    pruned there; what comes behind then stays too. With ``dry_run`` nothing is
    written but the object that shows the store's clock. Raises `CorruptError` if what is to be
    kept is damaged, before anything of it is deleted, and `RetryError` if the store does not
    answer; then the same call may be made again.
    """
    if tombstones is None:
        check_signer(bucket, run, signer)
    if grace_s < 0:
        raise InputError(f"a grace period of {grace_s} s")
    found = Pruned()
    boundaries = _boundaries(bucket)
    found.boundary = max(boundaries, default=0)
    found.anchor = _anchor(bucket, run, min([cutoff, *_checkpoints(bucket)]))
    if found.anchor is not None and found.anchor > found.boundary:
        found.boundary = found.anchor
        if not dry_run:
            _raise_boundary(bucket, run, found.anchor, signer)
            boundaries = _boundaries(bucket)
    now = with_retries(lambda: store_clock(bucket))
    due = now - timedelta(seconds=grace_s)
    if not dry_run:
        drop_dead_sweeps(bucket, now)
    found.swept = max((v for v, modified in boundaries.items() if modified <= due), default=0)
    if found.swept:
        _sweep_versions(bucket, run, found, tombstones, signer, dry_run)
        _sweep_folds(bucket, found, boundaries, dry_run)
    _sweep_blobs(bucket, run, found, due, dry_run)
    return found


def _anchor(bucket: Bucket, run: Run, cutoff: int) -> int | None:
    """The newest version at or before ``cutoff`` that is stored whole, is there, and leads to the
    newest."""
    newest = newest_version(bucket)
    if newest is None or cutoff < 0:
        return None
    later = {
        target
        for key in bucket.list(keys.COMPACTED)
        for base, target in [keys.compacted_of(key) or (0, 0)]
        if base is None
    }
    for version in range(min(cutoff, newest), -1, -1):
        try:
            manifest = read_manifest(bucket, run, version)
            stated: Manifest | CompactedDelta | None = manifest
            if manifest is not None and manifest.anchor is None:
                later_anchor = (
                    read_compacted_delta(bucket, run, None, version) if version in later else None
                )
                same = later_anchor is not None and later_anchor.digest == manifest.digest
                stated = later_anchor if same else None
        except CorruptError:
            continue
        if manifest is not None and manifest.pruned:
            return None
        if stated is None or not _is_there(bucket, run, stated):
            continue
        if (
            version == newest
            or RouteFinder(bucket, run, held=version, goal=newest).find() is not None
        ):
            return version
    return None


def _is_there(bucket: Bucket, run: Run, stated: Manifest | CompactedDelta) -> bool:
    """Whether every blob of an anchor is there; the delta of its manifest does not count."""
    anchor = stated.anchor if isinstance(stated, Manifest) else stated.payload
    assert anchor is not None
    try:
        blobs = [*table_blobs([anchor]), *read_blobs(bucket, run, anchor)]
    except CorruptError:
        return False
    return all(bucket.size(keys.blob(blob.hash)) == blob.bytes for blob in blobs)


def _raise_boundary(bucket: Bucket, run: Run, version: int, signer: Signer | None) -> None:
    key = keys.retention_floor(version)
    boundary = RetentionFloor(run=run.id, version=version)
    data = seal(boundary, key=key, signer=signer)
    # One that is there already is somebody else's, at the same height.
    with_retries(lambda: bucket.create(key, data))


def _boundaries(bucket: Bucket) -> dict[int, datetime]:
    found = {}
    for entry in bucket.list_objects(keys.RETENTION_FLOORS):
        number = keys.trailing_number(entry.key)
        if number is not None and entry.key == keys.retention_floor(number):
            found[number] = entry.modified
    return found


def _checkpoints(bucket: Bucket) -> list[int]:
    """The versions of the trainer's checkpoints, by the keys alone: even a damaged one counts."""
    found = []
    for key in bucket.list(keys.CHECKPOINTS):
        number = keys.trailing_number(key.removeprefix(keys.CHECKPOINTS).partition("/")[0])
        if number is not None:
            found.append(number)
    return found


def _sweep_versions(
    bucket: Bucket,
    run: Run,
    found: Pruned,
    tombstones: Callable[[int], bytes | None] | None,
    signer: Signer | None,
    dry_run: bool,
) -> None:
    for version in range(found.swept):
        tombstone = _tombstone(bucket, run, version, fill=tombstones is None)
        if tombstone is None:
            continue
        data = tombstones(version) if tombstones else encode_manifest(tombstone, signer=signer)
        if data is None:
            found.swept = version  # Not pruned where it comes from: the next time, perhaps.
            return
        found.manifests.append(version)
        if not dry_run:
            key = keys.manifest(version)
            with_retries(lambda key=key, data=data: bucket.put(key, data))  # type: ignore[misc]


def _sweep_folds(
    bucket: Bucket, found: Pruned, boundaries: dict[int, datetime], dry_run: bool
) -> None:
    doomed = [
        key
        for key in bucket.list(keys.COMPACTED)
        for base, target in [keys.compacted_of(key) or (found.swept, found.swept)]
        if (target if base is None else base) < found.swept
    ]
    found.folds += doomed
    doomed += [keys.retention_floor(version) for version in boundaries if version < found.swept]
    if not dry_run:
        for key in doomed:
            with_retries(lambda key=key: bucket.delete(key))  # type: ignore[misc]


def _tombstone(bucket: Bucket, run: Run, version: int, *, fill: bool) -> Manifest | None:
    """What takes a manifest's place, None if it already has or cannot be read: a damaged one
    keeps its name taken as well. That of one that is missing is made up to ``fill`` its name."""
    try:
        manifest = read_manifest(bucket, run, version)
    except CorruptError:
        return None
    if manifest is None and not fill:
        return None
    if manifest is None:
        digest = ZERO.hex() if version else run.digest
        return Manifest(
            run=run.id,
            version=version,
            digest=digest,
            epoch=0,
            nonce="pruned",
            created_at=0.0,
            pruned=True,
        )
    if manifest.pruned:
        return None
    return msgspec.structs.replace(
        manifest,
        base=None,
        base_digest=ZERO.hex(),
        delta=None,
        anchor=None,
        model_files=None,
        pruned=True,
    )


def _sweep_blobs(bucket: Bucket, run: Run, found: Pruned, due: datetime, dry_run: bool) -> None:
    if not found.swept:
        return
    references = _References(bucket, run, found.swept, set(found.folds))
    kept = references.look()
    old = {
        entry.key: entry.bytes
        for entry in bucket.list_objects(keys.BLOBS)
        if entry.key not in kept and entry.modified <= due
    }
    # Once more: a publisher that does a lost version over has perhaps just put it again. It would
    # put it a third time if it had to.
    doomed = [
        key
        for key in old
        if dry_run or ((again := bucket.head(key)) is not None and again.modified <= due)
    ]
    for key in doomed if dry_run else delete_blobs(bucket, run, doomed, references.look):
        found.blobs.append(key)
        found.bytes += old[key]
    for entry in bucket.list_objects(keys.PARTS):
        if entry.modified <= due and not dry_run:
            with_retries(lambda key=entry.key: bucket.delete(key))  # type: ignore[misc]


class _References:
    """The keys of all blobs that a version from ``start`` on, a fold, or run.json needs."""

    def __init__(self, bucket: Bucket, run: Run, start: int, gone: set[str]) -> None:
        self._bucket = bucket
        self._run = run
        self._next = start
        self._folds = set(gone)
        self._found = {keys.blob(file.blob) for file in run.model_files}

    def look(self) -> set[str]:
        """As they are now: what was not there at the look before is read."""
        newest = newest_version(self._bucket, newer_than=self._next - 1 if self._next else None)
        for version in range(self._next, (-1 if newest is None else newest) + 1):
            manifest = read_manifest(self._bucket, self._run, version)
            if manifest is not None:
                self._take(manifest)
                self._found |= {keys.blob(file.blob) for file in manifest.model_files or ()}
            self._next = version + 1
        for key in self._bucket.list(keys.COMPACTED):
            name = keys.compacted_of(key)
            if name is None or key in self._folds:
                continue
            fold = read_compacted_delta(self._bucket, self._run, *name)
            if fold is not None:
                self._take(fold)
            self._folds.add(key)
        return self._found

    def _take(self, stated: Manifest | CompactedDelta) -> None:
        blobs = all_blobs(self._bucket, self._run, stated)
        self._found |= {keys.blob(blob.hash) for blob in blobs}
