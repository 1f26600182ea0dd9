"""Retention: prunes old versions without forking the chain or stranding a reader.

The order makes a stop at any point harmless, and the same call then continues:

1. Find the newest anchor at or before the cutoff whose blobs exist and from which the newest
   version can be reached. Without one, do nothing.
2. Raise the retention floor to it: create ``weights/retention-floors/<version>.json``. Publishers
   read the floors after each commit and stop if their version lies below one. Floors are only ever
   created, so two retentions at once cannot lower one. Then read the tags once more: a tag is
   created before its writer reads the floors, so of a tag and a floor above it that are created at
   once, one writer sees the other's object.
3. Below the newest floor that is older than the grace period, and never above the anchor that was
   verified in step 1, read every manifest that is to be closed, and from there on every manifest
   and compacted delta that says which blobs are needed.
4. Replace each manifest below with a tombstone, and create one where a manifest is missing. The
   name of a committed version is thus never free again, and a writer that was stalled cannot commit
   under it.
5. Delete compacted deltas that begin below it, then floors below it.
6. Delete blobs that nothing refers to and that are older than the grace period: announce them (see
   `gc_intents`), read manifests and compacted deltas once more, delete. And parts of commits that
   were never made.

Readers that planned before step 2 have the grace period to fetch what they planned; later ones find
the tombstone of their next version and plan again. Writers need no grace period: a writer that
commits after the second read of step 6 checks its own blobs. Ages are measured by the store's
clock, against an object written for that purpose: no two clocks are compared.

The objects read here decide what is lost, so it counts as evidence only (see `evidence`): an object
that cannot be read, such as a checkpoint's commit, an anchor or a manifest, stops the call with
`UnreadableError` before anything is deleted. Two kinds of unreadable objects are passed over, and
reported in `Pruned.refused`: floors, because without one less is deleted, and manifests whose
numbers belong to no version, as a later version states.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from deltawire.codec import ZERO
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket, ObjectMeta, in_parallel, without_retries
from deltawire.store.traffic import count
from deltawire.sync.chain.evidence import Sound, Unknown, require_evidence, unreadable
from deltawire.sync.chain.gc_intents import delete_blobs, drop_dead_intents, store_clock
from deltawire.sync.chain.history import evidence_of_version
from deltawire.sync.chain.objects import (
    check_signer,
    committed_objects,
    read_compacted_delta,
    read_manifest,
    read_retention_floors,
)
from deltawire.sync.chain.payloads import all_blobs, read_blobs, table_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.tags import read_tags
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.manifest import CompactedDelta, Manifest, encode_manifest
from deltawire.wire.objects import decode_json
from deltawire.wire.payload import PayloadRef
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

GRACE_S = 24 * 3600.0
"""The default grace period for readers, in seconds."""

MAX_FILLED = 4096
"""The most missing versions for which one call creates tombstones."""

MAX_COMMIT_BYTES = 16 << 20

BURIED: Final = "buried"
"""The answer for a version that has a tombstone."""

FILLED = "pruned"
"""The nonce of a tombstone at a number that had no manifest."""

WINDOW = 32
"""Manifests read at a time, to find the newest one that is a tombstone."""


@dataclass
class Pruned:
    """The result of retention.

    The versions from ``anchor`` on are kept (None: no anchor was found). Versions below ``floor``
    are closed, those below ``pruned_below`` deleted. ``refused`` lists the objects that were
    passed over because they are damaged or unsigned.

    Example::

        done = prune(bucket, run, cutoff=newest - 100)
        print(len(done.blobs), done.bytes, done.refused)
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
    """Returns the bytes of a version's tombstone or floor in the run's own bucket, from which a
    relay copies them because it has no key; None if there is none.
    """

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
    """Closes the versions that readers of version ``cutoff`` and newer ones do not need, and
    deletes those that were closed longer than ``grace_s`` ago.

    Versions that a checkpoint of the trainer or a tag refers to are kept. A relay has no key and
    passes ``sealed``; versions that are not pruned in that bucket stay here too. With ``dry_run``
    nothing is written except the object that shows the store's clock. Raises `UnreadableError`,
    before any deletion, if an object cannot be read that decides what is kept, and `RetryError` if
    the store does not answer; the same call may then be repeated. Nothing here adds retries: a
    bucket of a class of one's own is put into a `RetryingBucket` first.

    Example::

        prune(bucket, run, cutoff=newest - 100, signer=signer)
    """
    if sealed is None:
        check_signer(bucket, run, signer)
    if grace_s < 0:
        raise InputError(
            f"the grace period is {grace_s} s", hint="give 0 or more seconds", run=bucket.url
        )
    without_retries(bucket)  # Refuses a layer that cannot do that before anything is deleted.
    call = _Retention(bucket, run, signer, sealed, dry_run=dry_run)
    found = call.prune(cutoff, timedelta(seconds=grace_s))
    if not dry_run:
        count("pruned", len(found.manifests))
    return found


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
        """A relay without a key writes unsigned floors and intents."""
        self._begin = 0
        """All versions below this one are tombstones already, which are not listed."""
        self._listed: list[int] = []
        """The versions from there on whose manifests a listing showed at the start."""

    def prune(self, cutoff: int, grace: timedelta) -> Pruned:
        found = self.found
        floors = read_retention_floors(self.bucket, self.run, unsigned=self._unsigned)
        found.refused += [str(error) for error in floors.refused]
        found.floor = floors.newest
        newest = newest_readable(self.bucket, self.run)
        if newest is None:
            return found
        self._begin = self._closed_below(floors.valid)
        versions = self._listed = list(committed_objects(self.bucket, newer_than=self._begin - 1))
        kept = [v for v in self._checkpoints() if v <= newest.version]
        cutoff = self._tagged(min([cutoff, *kept, newest.version]), newest.version)
        found.anchor = self._anchor(versions, cutoff, newest.version)
        valid = dict(floors.valid)
        if found.anchor is not None and found.anchor > found.floor:
            found.floor = found.anchor
            if not self._dry_run and self._raise_floor(found.anchor):
                floors = read_retention_floors(self.bucket, self.run, unsigned=self._unsigned)
                valid = dict(floors.valid)
                # A tag that was created since the first reading: its writer saw no floor above it.
                if (tagged := self._tagged(cutoff, newest.version)) < cutoff:
                    found.anchor = self._anchor(versions, tagged, newest.version)
        now = store_clock(self.bucket)
        due = now - grace
        if not self._dry_run:
            drop_dead_intents(self.bucket, now)
        closed = max((v for v, entry in valid.items() if entry.modified <= due), default=0)
        # A former key holder may have raised the floor: prune only what no object needs now.
        found.pruned_below = min(closed, found.anchor or 0)
        if found.pruned_below:
            self._delete(valid, due)
        return found

    def _closed_below(self, floors: Iterable[int]) -> int:
        """Returns a version below which an earlier call closed all it could, 0 if none did.

        A call deletes the floors below its own last, and buries the lowest version last of all.
        """
        lowest = min(floors, default=0)
        if lowest and self._is_closed(lowest - 1) and self._is_closed(self._first()):
            return lowest
        return 0

    def _is_closed(self, version: int) -> bool:
        with suppress(CorruptError):  # Then more is read than need be.
            manifest = read_manifest(self.bucket, self.run, version)
            return manifest is not None and manifest.pruned
        return False

    def _first(self) -> int:
        """Returns the lowest version; a relay may have begun with any."""
        if self.bucket.exists(keys.manifest(0)):
            return 0
        return next(iter(committed_objects(self.bucket, newer_than=-1)), 0)

    def _delete(self, floors: dict[int, ObjectMeta], due: datetime) -> None:
        """Reads everything that decides what is kept, and only then deletes the rest."""
        tombstones = self._tombstones()
        end = self.found.pruned_below  # Lower now if the run's own bucket has not pruned as much.
        self.found.compacted = [
            key
            for key in self.bucket.list(keys.COMPACTED)
            if (name := keys.compacted_of(key)) is not None
            and (name[1] if name[0] is None else name[0]) < end
        ]
        references = _References(self.bucket, self.run, end, set(self.found.compacted))
        kept = references.update()
        references.so = "nothing more was deleted"
        self._bury(tombstones)
        if not self._dry_run:
            old = [keys.retention_floor(version) for version in floors if version < end]
            for key in [*self.found.compacted, *old]:
                self.bucket.delete(key)
        self._delete_blobs(references, kept, due)
        self.found.refused += references.refused

    def _anchor(self, versions: list[int], cutoff: int, newest: int) -> int | None:
        """Returns the newest version up to ``cutoff`` that has an anchor with all its blobs, and
        from which the newest version can be reached.
        """
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
                continue  # An older anchor keeps more: a bad answer costs space only.
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
            return False  # Then an older anchor is taken, which keeps more.
        return all(self.bucket.size(keys.blob(blob.hash)) == blob.bytes for blob in blobs)

    def _checkpoints(self) -> list[int]:
        """Returns the versions of the trainer's checkpoints, and the ends of kept intervals.

        Listed twice, because a listing that left one out would let its version be deleted. Raises
        `UnreadableError` for a commit that cannot be read, and for a mark that names no interval.
        """
        listed = {key for _ in range(2) for key in self.bucket.list(keys.CHECKPOINTS)}
        found: list[int] = []
        for key in sorted(listed):
            number = keys.trailing_number(key.removeprefix(keys.CHECKPOINTS).partition("/")[0])
            interval = keys.interval_of(key)
            if interval is None and key.rpartition("/")[2].startswith(keys.INTERVAL_MARK):
                error = CorruptError("a mark that names no interval", run=self.bucket.url, key=key)
                raise unreadable(self.bucket, key, error)
            found += interval or ()
            if number is None or key != keys.checkpoint_commit(number):
                continue
            commit = require_evidence(self.bucket, key, partial(self._checkpoint, key))
            if commit is not None and commit.version == number:
                found.append(number)
        return found

    def _tagged(self, cutoff: int, newest: int) -> int:
        """Returns the lowest tagged version, at most ``cutoff``.

        Reports tags at versions that are lost: a tag that was created after the floor above it,
        by a writer that stopped before it withdrew the tag.
        """
        tags = read_tags(self.bucket, self.run, so="nothing was deleted")
        for version, name in sorted((tag.version, name) for name, tag in tags.items()):
            if version >= cutoff:
                break
            if self._anchor(self._listed, version, newest) is not None or not self._lost(version):
                return version
            lost = f"the tag {name} names version {version}, which retention has closed"
            if lost not in self.found.refused:
                self.found.refused.append(lost)
        return cutoff

    def _lost(self, version: int) -> bool:
        """Returns whether no anchor leads to a version any more, which only tombstones show."""
        for number in range(version, -1, -1):
            key = keys.manifest(number)
            read = partial(read_manifest, self.bucket, self.run, number)
            manifest = require_evidence(self.bucket, key, read)
            if manifest is not None and manifest.pruned:
                return True
            later = keys.compacted(None, number)
            if (manifest is not None and manifest.anchor) or self.bucket.is_listed(later):
                return False
        return False

    def _checkpoint(self, key: str) -> _CheckpointCommit | None:
        data = self.bucket.get(key, limit=MAX_COMMIT_BYTES)
        if data is None:
            return None
        return decode_json(data, _CheckpointCommit, run=self.bucket.url, key=key)

    def _raise_floor(self, version: int) -> bool:
        key = keys.retention_floor(version)
        if self._sealed is not None and self.run.public_key:
            data = self._sealed.floor(version)
        else:
            floor = RetentionFloor(run=self.run.id, version=version)
            data = seal(floor, key=key, signer=self._signer)
        if data is None:
            return False
        # An existing one was created by another retention at the same version, or is junk.
        if not self.bucket.create(key, data):
            floors = read_retention_floors(self.bucket, self.run, unsigned=self._unsigned)
            if version not in floors.valid:
                self.bucket.put(key, data)
        return True

    def _tombstones(self) -> list[_Tombstone]:
        """Returns what replaces the manifests below `Pruned.pruned_below`, the lowest first."""
        found: list[_Tombstone] = []
        listed = set(self._listed)
        for version, tombstone in self._unburied(sorted(self._filled(listed)), listed):
            if self._sealed is not None:
                data = self._sealed.tombstone(version)
            else:
                data = encode_manifest(tombstone, signer=self._signer)
            if data is None:
                self.found.pruned_below = version  # Not pruned in the run's own bucket yet: wait.
                break
            found.append(_Tombstone(version, data, fills=tombstone.nonce == FILLED))
        return found

    def _bury(self, tombstones: Sequence[_Tombstone]) -> None:
        """Replaces manifests with their tombstones, the lowest last: it shows that no other is
        left (see `_unburied`)."""
        for one in reversed(tombstones):
            key = keys.manifest(one.version)
            if not self._dry_run:
                # Where no manifest was seen, none may be written over: the store decides.
                if one.fills and not self.bucket.create(key, one.data):
                    continue
                if not one.fills:
                    self.bucket.put(key, one.data)
            self.found.manifests.append(one.version)
        self.found.manifests.sort()

    def _unburied(
        self, versions: Sequence[int], listed: Container[int]
    ) -> list[tuple[int, Manifest]]:
        """Returns the versions without a tombstone, ascending, each with its tombstone.

        The lowest is buried last. If it is a tombstone, so are all below another one: an earlier
        release, which began with the lowest, wrote them in ascending order. Then this reads from
        the newest version down, a few at a time, until one is a tombstone, and below that only
        versions that a listing does not show: the cost is that of what is new, however many
        versions were pruned before. Else all are read: a call may have stopped, or a relay that
        stood still copied tombstones above versions that it had copied before.
        """
        found: list[tuple[int, Manifest]] = []
        buried, ordered = False, bool(versions) and self._is_closed(versions[0])
        for end in range(len(versions), 0, -WINDOW):
            window = versions[max(end - WINDOW, 0) : end]
            if buried:
                window = [version for version in window if version not in listed]
            read = in_parallel(self.bucket, partial(self._tombstone, listed), window)
            found += [
                (version, tombstone)
                for version, tombstone in zip(window, read, strict=True)
                if isinstance(tombstone, Manifest)
            ]
            buried = ordered and (buried or BURIED in read)
        return sorted(found, key=lambda one: one[0])

    def _filled(self, versions: Iterable[int]) -> set[int]:
        """Returns the versions below `Pruned.pruned_below`, including missing ones."""
        end = self.found.pruned_below
        listed = sorted(v for v in versions if v < end)
        ends = pairwise([self._begin - 1, *listed, end])
        gaps = [(low + 1, high) for low, high in ends if high > low + 1]
        if self._sealed is not None:
            gaps = []
        missing = sum(high - low for low, high in gaps)
        if missing > MAX_FILLED:
            self.found.refused.append(
                f"{missing} versions below {end} are missing: no tombstones were created for them"
            )
            gaps = []
        return {*listed, *(v for low, high in gaps for v in range(low, high))}

    def _tombstone(
        self, listed: Container[int], version: int
    ) -> Manifest | Literal["buried"] | None:
        """Returns the tombstone that replaces a manifest, or fills a number that has none; `BURIED`
        if it already is one. None if an object that cannot be read occupies a number that belongs
        to no version.
        """
        manifest: Manifest | None = None
        if version in listed:
            read = partial(read_manifest, self.bucket, self.run, version)
            evidence = evidence_of_version(self.bucket, self.run, version, read)
            if isinstance(evidence, Unknown):
                self.found.refused.append(str(evidence.error))
                return None
            manifest = evidence.value if isinstance(evidence, Sound) else None
        if manifest is None:
            return Manifest(
                run=self.run.id,
                version=version,
                digest=ZERO.hex() if version else self.run.digest,
                epoch=0,
                nonce=FILLED,
                created_at=0.0,
                pruned=True,
            )
        if manifest.pruned:
            return BURIED
        return msgspec.structs.replace(
            manifest,
            base=None,
            base_digest=ZERO.hex(),
            delta=None,
            anchor=None,
            model_files=None,
            pruned=True,
        )

    def _delete_blobs(self, references: _References, kept: set[str], due: datetime) -> None:
        old = {
            entry.key: entry.bytes
            for entry in self.bucket.list_objects(keys.BLOBS)
            if entry.key not in kept and entry.modified <= due
        }
        # Read again: a publisher that repeats a lost version may just have stored it again. If it
        # is deleted anyway, the publisher stores it a third time.
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
        if not self._dry_run:
            for entry in self.bucket.list_objects(keys.PARTS):
                if entry.modified <= due:
                    self.bucket.delete(entry.key)


class _CheckpointCommit(msgspec.Struct):
    """The member of a checkpoint's commit that retention needs."""

    version: Annotated[int, msgspec.Meta(ge=0)]


class _Tombstone(NamedTuple):
    """The object of a closed version; ``fills`` says that no manifest was there."""

    version: int
    data: bytes
    fills: bool


class _References:
    """Collects the keys of all blobs that run.json, compacted deltas and the versions from
    ``start`` on need. ``gone`` names the compacted deltas that are about to be deleted.

    ``so`` completes the message of its error: what was not done.
    """

    def __init__(self, bucket: Bucket, run: Run, start: int, gone: set[str]) -> None:
        self._bucket = bucket
        self._run = run
        self._start = start
        self._compacted = set(gone)
        self._read: set[int] = set()
        self._updated = False
        self._found = {keys.blob(file.blob) for file in run.model_files}
        self.refused: list[str] = []
        self.so = "nothing was deleted"

    def update(self) -> set[str]:
        """Returns the current keys; reads the objects that are new since the last call.

        Raises `UnreadableError` for an object that cannot be read: its blobs may be needed.
        """
        newer_than = self._start - 1 if self._start else None
        # A version of after the first call may need blobs that are about to be deleted, and only
        # later calls can see it: one listing that came back short would leave it out.
        times = 2 if self._updated else 1
        self._updated = True
        listed, compacted = set[int](), set[str]()
        for _ in range(times):
            listed.update(committed_objects(self._bucket, newer_than=newer_than))
            compacted.update(self._bucket.list(keys.COMPACTED))
        unread = sorted(listed - self._read)
        in_parallel(self._bucket, self._read_version, unread)
        for key in sorted(compacted):
            name = keys.compacted_of(key)
            if name is None or key in self._compacted:
                continue
            read = partial(self._blobs_of_compacted, *name)
            self._found |= require_evidence(self._bucket, key, read, so=self.so) or set()
            self._compacted.add(key)
        return self._found

    def _read_version(self, version: int) -> None:
        read = partial(self._blobs_of_version, version)
        evidence = evidence_of_version(self._bucket, self._run, version, read, so=self.so)
        if isinstance(evidence, Unknown):
            self.refused.append(str(evidence.error))
        elif isinstance(evidence, Sound):
            self._found |= evidence.value
        self._read.add(version)

    def _blobs_of_version(self, version: int) -> set[str] | None:
        manifest = read_manifest(self._bucket, self._run, version)
        if manifest is None:
            return None
        files = {keys.blob(file.blob) for file in manifest.model_files or ()}
        return files | self._blobs(manifest)

    def _blobs_of_compacted(self, base: int | None, version: int) -> set[str] | None:
        compacted = read_compacted_delta(self._bucket, self._run, base, version)
        return None if compacted is None else self._blobs(compacted)

    def _blobs(self, stated: Manifest | CompactedDelta) -> set[str]:
        return {keys.blob(one.hash) for one in all_blobs(self._bucket, self._run, stated)}
