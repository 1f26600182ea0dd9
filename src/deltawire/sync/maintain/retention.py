"""Retention: prunes old versions without forking the chain or stranding a reader.

In this order, so that stopping anywhere does no harm and the same call continues from there:

1. Find the newest anchor at or before the cutoff whose blobs are there and from which the newest
   version can be reached. If there is none, nothing happens.
2. Raise the retention floor to it: create ``weights/retention-floors/<version>.json``. Publishers
   read the floors after each commit and stop if their version lies below one. Floors are only ever
   created, so two retentions at once cannot lower one.
3. Below the newest floor that is older than the grace period, and never above the anchor that was
   verified in step 1: replace each manifest with a tombstone, and create one where a manifest is
   missing. So the name of a committed version is never free again, and a writer that was stalled
   all the while cannot commit under it.
4. Delete compacted deltas that begin below it, then floors below it.
5. Delete blobs that nothing refers to and that are older than the grace period: announce them (see
   `gc_intents`), read manifests and compacted deltas once more, delete. And parts of commits that
   were never made.

Readers that planned before step 2 have the grace period to fetch what they planned; later ones find
the tombstone of their next version and plan again. Writers need no grace: what one commits after
the second read of step 5 it checks itself. Ages are the store's own, measured against an object
written for the purpose: no two clocks are compared.

A key by itself proves nothing. Floors must be sealed, and signed in a signed run; checkpoints count
if their commit can be read; damaged compacted deltas and any object above the newest readable
version are ignored. All of these are reported in `Pruned.refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Annotated

import msgspec

from deltawire.codec import ZERO
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket, ObjectMeta, RetryingBucket
from deltawire.sync.chain.gc_intents import delete_blobs, drop_dead_intents, store_clock
from deltawire.sync.chain.objects import (
    check_signer,
    committed_objects,
    read_compacted_delta,
    read_manifest,
    read_retention_floors,
)
from deltawire.sync.chain.payloads import all_blobs, read_blobs, table_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.manifest import CompactedDelta, Manifest, encode_manifest
from deltawire.wire.objects import decode_json
from deltawire.wire.payload import PayloadRef
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

GRACE_S = 24 * 3600.0
"""The default time for a reader to fetch what it planned."""

MAX_FILLED = 4096
"""The most names of missing versions that one call fills with tombstones."""

MAX_COMMIT_BYTES = 16 << 20


@dataclass
class Pruned:
    """The result of retention.

    It keeps the versions from ``anchor`` on (None: none was found). Versions below ``floor`` are
    closed, those below ``pruned_below`` deleted. ``refused`` lists the objects that were ignored
    because they are damaged or unsigned.
    """

    anchor: int | None = None
    floor: int = 0
    pruned_below: int = 0
    manifests: list[int] = field(default_factory=list)
    compacted: list[str] = field(default_factory=list)
    blobs: list[str] = field(default_factory=list)
    bytes: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SealedElsewhere:
    """Objects that a relay, which has no key, copies from the run's own bucket: the bytes of a
    version's tombstone or floor, None if there is none."""

    tombstone: Callable[[int], bytes | None]
    floor: Callable[[int], bytes | None]


def prune(
    bucket: Bucket,
    run: Run,
    *,
    cutoff: int,
    grace_s: float = GRACE_S,
    signer: Signer | None = None,
    dry_run: bool = False,
    sealed: SealedElsewhere | None = None,
) -> Pruned:
    """Closes the versions that are not needed to read version ``cutoff`` or a newer one, and
    deletes those that were closed longer than ``grace_s`` ago.

    Versions that a checkpoint of the trainer refers to are kept. A relay has no key and passes
    ``sealed``; versions that are not pruned in that bucket stay here too. With ``dry_run`` nothing
    is written except the object that shows the store's clock. Raises `CorruptError` if a version
    that is to be kept is damaged, before anything of it is deleted, and `RetryError` if the store
    does not answer; the same call may then be repeated.

    Example::

        prune(bucket, run, cutoff=newest - 100, signer=signer)
    """
    if sealed is None:
        check_signer(bucket, run, signer)
    if grace_s < 0:
        raise InputError(
            f"a grace period of {grace_s} s", hint="give 0 or more seconds", run=bucket.url
        )
    call = _Retention(RetryingBucket.over(bucket), run, signer, sealed, dry_run=dry_run)
    return call.prune(cutoff, timedelta(seconds=grace_s))


class _Retention:
    """One call of `prune`."""

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        signer: Signer | None,
        sealed: SealedElsewhere | None,
        *,
        dry_run: bool,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.found = Pruned()
        self._signer = signer
        self._sealed = sealed
        self._dry_run = dry_run
        self._unsigned = sealed is not None
        """A relay's own floors and intents carry no signature where it has no key."""

    def prune(self, cutoff: int, grace: timedelta) -> Pruned:
        found = self.found
        floors = read_retention_floors(self.bucket, self.run, unsigned=self._unsigned)
        found.refused += [str(error) for error in floors.refused]
        found.floor = floors.newest
        newest = newest_readable(self.bucket, self.run)
        if newest is None:
            return found
        versions = list(committed_objects(self.bucket))
        kept = [v for v in self._checkpoints() if v <= newest.version]
        cutoff = min([cutoff, *kept, newest.version])
        found.anchor = self._anchor(versions, cutoff, newest.version)
        valid = dict(floors.valid)
        if found.anchor is not None and found.anchor > found.floor:
            found.floor = found.anchor
            if not self._dry_run and self._raise_floor(found.anchor):
                floors = read_retention_floors(self.bucket, self.run, unsigned=self._unsigned)
                valid = dict(floors.valid)
        now = store_clock(self.bucket)
        due = now - grace
        if not self._dry_run:
            drop_dead_intents(self.bucket, now)
        closed = max((v for v, entry in valid.items() if entry.modified <= due), default=0)
        # A former key holder may have raised the floor: prune only what nothing needs now.
        found.pruned_below = min(closed, found.anchor or 0)
        if found.pruned_below:
            self._bury(versions)
            self._delete_below(valid)
            self._delete_blobs(newest.version, due)
        return found

    def _anchor(self, versions: list[int], cutoff: int, newest: int) -> int | None:
        """Returns the newest version up to ``cutoff`` that is stored whole, has its blobs, and
        leads to the newest."""
        later = {
            name[1]
            for key in self.bucket.list(keys.COMPACTED)
            if (name := keys.compacted_of(key)) is not None and name[0] is None
        }
        for version in sorted((v for v in versions if v <= cutoff), reverse=True):
            try:
                manifest = read_manifest(self.bucket, self.run, version)
                anchor = None if manifest is None else manifest.anchor
                if manifest is not None and anchor is None and version in later:
                    made = read_compacted_delta(self.bucket, self.run, None, version)
                    anchor = made.payload if made and made.digest == manifest.digest else None
            except CorruptError:
                continue
            if manifest is not None and manifest.pruned:
                return None
            if anchor is None or not self._is_there(anchor):
                continue
            finder = RouteFinder(self.bucket, self.run, held=version, goal=newest)
            if version == newest or finder.find() is not None:
                return version
        return None

    def _is_there(self, anchor: PayloadRef) -> bool:
        """Returns whether every blob of an anchor exists, regardless of its manifest's delta."""
        try:
            blobs = [*table_blobs([anchor]), *read_blobs(self.bucket, self.run, anchor)]
        except CorruptError:
            return False
        return all(self.bucket.size(keys.blob(blob.hash)) == blob.bytes for blob in blobs)

    def _checkpoints(self) -> list[int]:
        """Returns the versions of the trainer's checkpoints whose commit can be read."""
        found = []
        for key in self.bucket.list(keys.CHECKPOINTS):
            number = keys.trailing_number(key.removeprefix(keys.CHECKPOINTS).partition("/")[0])
            if number is None or key != keys.checkpoint_commit(number):
                continue
            try:
                data = self.bucket.get(key, limit=MAX_COMMIT_BYTES)
                if data is None:
                    continue
                commit = decode_json(data, _CheckpointCommit, run=self.bucket.url, key=key)
                if commit.version == number:
                    found.append(number)
            except CorruptError as error:
                self.found.refused.append(str(error))
        return found

    def _raise_floor(self, version: int) -> bool:
        key = keys.retention_floor(version)
        if self._sealed is not None and self.run.public_key:
            data = self._sealed.floor(version)
        else:
            floor = RetentionFloor(run=self.run.id, version=version)
            data = seal(floor, key=key, signer=self._signer)
        if data is None:
            return False
        # One that is there already is another retention's, at the same version; or junk.
        if not self.bucket.create(key, data):
            floors = read_retention_floors(self.bucket, self.run, unsigned=self._unsigned)
            if version not in floors.valid:
                self.bucket.put(key, data)
        return True

    def _bury(self, versions: Iterable[int]) -> None:
        """Puts tombstones in the place of the manifests below `Pruned.pruned_below`."""
        for version in sorted(self._filled(versions)):
            tombstone = self._tombstone(version)
            if tombstone is None:
                continue
            if self._sealed is not None:
                data = self._sealed.tombstone(version)
            else:
                data = encode_manifest(tombstone, signer=self._signer)
            if data is None:
                self.found.pruned_below = version  # Not pruned where it comes from: wait for that.
                return
            self.found.manifests.append(version)
            if not self._dry_run:
                self.bucket.put(keys.manifest(version), data)

    def _filled(self, versions: Iterable[int]) -> set[int]:
        """Returns the versions below `Pruned.pruned_below`, those that are missing included."""
        end = self.found.pruned_below
        listed = sorted(v for v in versions if v < end)
        gaps = [(low + 1, high) for low, high in pairwise([-1, *listed, end]) if high > low + 1]
        if self._sealed is not None:
            gaps = []
        missing = sum(high - low for low, high in gaps)
        if missing > MAX_FILLED:
            self.found.refused.append(f"{missing} versions below {end} are missing: not filled")
            gaps = []
        return {*listed, *(v for low, high in gaps for v in range(low, high))}

    def _tombstone(self, version: int) -> Manifest | None:
        """Returns what replaces a manifest, None if it is one already or cannot be read: a damaged
        manifest keeps the name taken as well."""
        try:
            manifest = read_manifest(self.bucket, self.run, version)
        except CorruptError as error:
            self.found.refused.append(str(error))
            return None
        if manifest is None:
            return Manifest(
                run=self.run.id,
                version=version,
                digest=ZERO.hex() if version else self.run.digest,
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

    def _delete_below(self, floors: dict[int, ObjectMeta]) -> None:
        end = self.found.pruned_below
        for key in self.bucket.list(keys.COMPACTED):
            name = keys.compacted_of(key)
            if name is not None and (name[1] if name[0] is None else name[0]) < end:
                self.found.compacted.append(key)
        if not self._dry_run:
            old = [keys.retention_floor(version) for version in floors if version < end]
            for key in [*self.found.compacted, *old]:
                self.bucket.delete(key)

    def _delete_blobs(self, newest: int, due: datetime) -> None:
        start, gone = self.found.pruned_below, set(self.found.compacted)
        references = _References(self.bucket, self.run, start, newest, gone)
        kept = references.update()
        old = {
            entry.key: entry.bytes
            for entry in self.bucket.list_objects(keys.BLOBS)
            if entry.key not in kept and entry.modified <= due
        }
        # Once more: a publisher that repeats a lost version has perhaps just put it again. It puts
        # it a third time if it has to.
        doomed = [
            key
            for key in old
            if self._dry_run
            or ((again := self.bucket.head(key)) is not None and again.modified <= due)
        ]
        deleted: Iterable[str] = doomed
        if not self._dry_run:
            deleted = delete_blobs(
                self.bucket, self.run, doomed, references.update, signer=self._signer
            )
        for key in deleted:
            self.found.blobs.append(key)
            self.found.bytes += old[key]
        self.found.refused += references.refused
        if not self._dry_run:
            for entry in self.bucket.list_objects(keys.PARTS):
                if entry.modified <= due:
                    self.bucket.delete(entry.key)


class _CheckpointCommit(msgspec.Struct):
    """The member of a checkpoint's commit that retention needs."""

    version: Annotated[int, msgspec.Meta(ge=0)]


class _References:
    """The keys of all blobs that a version from ``start`` on, a compacted delta or run.json
    needs."""

    def __init__(self, bucket: Bucket, run: Run, start: int, newest: int, gone: set[str]) -> None:
        self._bucket = bucket
        self._run = run
        self._start = start
        self._newest = newest
        self._compacted = set(gone)
        self._read: set[int] = set()
        self._found = {keys.blob(file.blob) for file in run.model_files}
        self.refused: list[str] = []

    def update(self) -> set[str]:
        """Returns them as they are now: reads what was not there at the call before.

        Raises `CorruptError` for a manifest up to the newest readable version that is damaged: its
        blobs may be needed once it is repaired. Damaged objects above that hold no blobs.
        """
        newer_than = self._start - 1 if self._start else None
        for version in committed_objects(self._bucket, newer_than=newer_than):
            if version not in self._read:
                self._read_version(version)
        for key in self._bucket.list(keys.COMPACTED):
            name = keys.compacted_of(key)
            if name is None or key in self._compacted:
                continue
            self._compacted.add(key)
            try:
                compacted = read_compacted_delta(self._bucket, self._run, *name)
                if compacted is not None:
                    self._add(compacted)
            except CorruptError as error:
                self.refused.append(str(error))
        return self._found

    def _read_version(self, version: int) -> None:
        try:
            manifest = read_manifest(self._bucket, self._run, version)
        except CorruptError as error:
            if version <= self._newest:
                raise
            self.refused.append(str(error))
            return  # Not remembered: a newer call may find it whole.
        self._read.add(version)
        if manifest is not None:
            self._add(manifest)
            self._found |= {keys.blob(file.blob) for file in manifest.model_files or ()}

    def _add(self, stated: Manifest | CompactedDelta) -> None:
        blobs = all_blobs(self._bucket, self._run, stated)
        self._found |= {keys.blob(blob.hash) for blob in blobs}
