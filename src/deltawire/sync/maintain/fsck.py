"""Checks a run: every object it should have, every bit, and every route between versions.

The run may be live: commits, pruning and compaction during the check are not faults.

The check makes one pass in the order of versions with one mirror, and reads each manifest,
compacted delta and blob once, however many are damaged. A version counts as reached if a sound
anchor leads to it, or a sound step from a version that was reached. Objects are fetched twice only
if a compacted delta is needed after the mirror has moved past its base. Versions are those that a
listing shows, and gaps between them are reported as gaps: keys may state any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket, overwrites_on_create
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.objects import (
    committed_versions,
    find_run,
    get_blob,
    newest_version,
    read_compacted_delta,
    read_manifest,
    read_retention_floors,
)
from deltawire.sync.chain.payloads import read_blobs, table_blobs
from deltawire.sync.follow.fetch import decode_anchor, decode_delta, in_order, read_for
from deltawire.sync.follow.load import fetch_anchor
from deltawire.sync.follow.mirror import Bits, Mirror, empty_mirror
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.payload import BlobRef, PayloadRef
from deltawire.wire.run import Run

Level = Literal["error", "warning"]
Progress = Callable[[str, int, int], None]

T = TypeVar("T")

READERS = 8
"""Small objects read at once from a remote store."""


class StatedStep(NamedTuple):
    """A step to a version from ``base`` (None: from nothing), the object at ``key`` that states it,
    its payload, and the blobs that it needs."""

    base: int | None
    stated: Manifest | CompactedDelta
    payload: PayloadRef
    key: str
    blobs: list[BlobRef]


@dataclass(frozen=True)
class RunFault:
    """A missing or wrong object. A ``warning`` costs readers extra bytes at most; an ``error``
    makes a version unreadable.
    """

    level: Level
    key: str
    version: int | None
    message: str


@dataclass
class CheckedRun:
    """The findings of a check. ``first`` is the oldest version here: 0 in the run's own bucket, at
    a relay's destination the one that the relay began with. ``newest`` is the newest version with a
    readable manifest. No route leads to the ``unreachable`` versions.
    """

    versions: int = 0
    first: int = 0
    newest: int | None = None
    floor: int = 0
    pruned: int = 0
    anchors: int = 0
    compacted: int = 0
    blobs: int = 0
    bytes: int = 0
    unreferenced: int = 0
    unreferenced_bytes: int = 0
    unreachable: list[int] = field(default_factory=list)
    faults: list[RunFault] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Returns whether the check found no error; warnings are allowed."""
        return not any(fault.level == "error" for fault in self.faults)


def check_run(
    bucket: Bucket,
    *,
    deep: bool = True,
    public_key: str = "",
    progress: Progress | None = None,
) -> CheckedRun:
    """Checks the run in a bucket. Changes nothing; to probe a remote store, it tries to create
    run.json again with the same bytes. No request is repeated here: a bucket of a class of one's
    own is put into a `RetryingBucket` first.

    Without ``deep``, blobs are only looked up by name and size. With it, every blob is read, and
    every version is rebuilt in a mirror and compared with its digest. ``progress`` is called with
    the kind of object being checked, the number done and the total. Raises `CorruptError` if
    ``run.json`` cannot be read, `InputError` if there is no run at all, `RetryError` if the store
    does not answer.

    Example::

        found = check_run(open_bucket("s3://bucket/run"))
        assert found.whole, found.faults
    """
    run = find_run(bucket, public_key=public_key)
    if run is None:
        if newest_version(bucket) is None:
            raise InputError("there is no run here", hint="check the path", run=bucket.url)
        raise CorruptError("versions of a run without run.json", run=bucket.url, key=keys.RUN)
    return _Check(bucket, run, progress or _silent).all(deep=deep)


def _silent(*_: object) -> None:
    pass


class _Check:
    def __init__(self, bucket: Bucket, run: Run, progress: Progress) -> None:
        self.bucket = bucket
        self.run = run
        self.found = CheckedRun()
        self._progress = progress
        self._listed: list[int] = []
        self._manifests: dict[int, Manifest] = {}
        self._steps: dict[int, list[StatedStep]] = {}
        """The deltas, compacted or not, by the version that they lead to."""
        self._anchors: dict[int, list[StatedStep]] = {}
        self._compacted_from: dict[int, list[StatedStep]] = {}
        self._bad: set[str] = set()
        """Missing or damaged blobs, and compacted deltas that do not connect versions."""
        self._read: set[str] = set()
        """Blobs whose content matches their name."""
        self._reported: set[tuple[str, int | None]] = set()
        self._reached: dict[int, StatedStep] = {}
        """The step that led to each version reached, by version."""

    def all(self, *, deep: bool) -> CheckedRun:
        found = self.found
        if overwrites_on_create(self.bucket, keys.RUN):
            self._fault(
                "error",
                keys.RUN,
                None,
                "the store overwrites objects that must be created once (it ignores "
                "If-None-Match): two publishers would fork the run",
            )
        self._listed = sorted(committed_versions(self.bucket))
        if not self._listed:
            return found
        found.versions = len(self._listed)
        found.first = self._listed[0]
        found.floor = self._read_floors(found.first)
        self._read_manifests()
        found.newest = max(self._manifests, default=None)
        self._report_gaps()
        self._read_compacted()
        self._check_blobs()
        if deep:
            self._rebuild()
            self._read_the_rest()
        else:
            self._follow()
        for version in self._listed:
            if version >= found.floor and version not in self._reached:
                found.unreachable.append(version)
                self._fault("error", "", version, "no route leads to this version")
        if not any(version in self._reached for version in self._manifests):
            self._fault("error", keys.MANIFESTS, None, "no version of the run can be read")
        self._forget_pruned()
        return found

    def _read_floors(self, first: int) -> int:
        """Returns the newest floor, and reports those that retention did not create.

        A relay has no key; it records the version that it began with, the first one here, in an
        unsigned floor.
        """
        floors = read_retention_floors(self.bucket, self.run)
        unsigned = read_retention_floors(self.bucket, self.run, unsigned=True)
        began = first if first in unsigned.valid else 0
        for error in floors.refused:
            if not began or error.key != keys.retention_floor(began):
                self._fault("warning", error.key, error.version, error.message)
        return max(floors.newest, began)

    def _forget_pruned(self) -> None:
        """Drops faults of versions that retention pruned during the check."""
        now = read_retention_floors(self.bucket, self.run).newest
        if now <= self.found.floor:
            return
        self.found.floor = now
        kept = [f for f in self.found.faults if f.version is None or f.version >= now]
        self.found.faults = kept
        self.found.unreachable = [version for version in self.found.unreachable if version >= now]

    def _fault(self, level: Level, key: str, version: int | None, message: str) -> None:
        if (key, version) not in self._reported:
            self._reported.add((key, version))
            self.found.faults.append(RunFault(level, key, version, message))

    def _level(self, version: int) -> Level:
        """Versions below the floor are closed: nothing needs them."""
        return "error" if version >= self.found.floor else "warning"

    def _read_all(self, what: str, read: Callable[[T], object], items: list[T]) -> Iterator[object]:
        """Yields the result of ``read`` for each item, in order, or the `CorruptError` that it
        raised.
        """

        def one(item: T) -> object:
            try:
                return read(item)
            except CorruptError as error:
                return error  # It becomes a fault of the report; nothing is changed.

        readers = 1 if self.bucket.local else READERS
        with WorkerThreads(readers, thread_name_prefix="checker") as pool:
            for done, result in enumerate(in_order(pool, one, items, ahead=2 * readers)):
                self._progress(what, done, len(items))
                yield result
        self._progress(what, len(items), len(items))

    def _read_manifests(self) -> None:
        damaged: dict[int, str] = {}
        epoch = 0
        read = self._read_all(
            "manifests", lambda v: read_manifest(self.bucket, self.run, v), self._listed
        )
        for version, manifest in zip(self._listed, read, strict=True):
            key = keys.manifest(version)
            if not isinstance(manifest, Manifest):
                damaged[version] = (
                    manifest.message if isinstance(manifest, CorruptError) else "it is missing"
                )
                continue
            self._manifests[version] = manifest
            self.found.pruned += manifest.pruned
            self.found.anchors += manifest.anchor is not None
            if manifest.delta is not None:
                step = self._step(manifest.base, manifest, manifest.delta, key)
                self._steps.setdefault(version, []).append(step)
            if manifest.anchor is not None:
                step = self._step(None, manifest, manifest.anchor, key)
                self._anchors.setdefault(version, []).append(step)
            base = self._manifests.get(manifest.base) if manifest.base is not None else None
            if base is not None and base.digest != manifest.base_digest:
                self._fault(
                    "error", key, version, "it builds on a digest that its base does not have"
                )
            if not manifest.pruned and manifest.epoch < epoch:
                self._fault("error", key, version, "its epoch is below that of the version before")
            epoch = max(epoch, manifest.epoch)
        for version, message in damaged.items():
            self._fault(self._level(version), keys.manifest(version), version, message)

    def _report_gaps(self) -> None:
        """Reports numbers without a manifest. Writers skip a number only if an object occupies it,
        so a gap below the newest version is a lost manifest.
        """
        first, newest = self.found.first, self.found.newest
        if first > self.found.floor:
            message = f"nothing below version {first} exists, and no retention floor closes it"
            self._fault("error", keys.manifest(first - 1), None, message)
        for low, high in pairwise(self._listed):
            if high == low + 1 or newest is None or high > newest:
                continue
            missing = "the manifest is missing"
            if high > low + 2:
                missing = f"the manifests of versions {low + 1} to {high - 1} are missing"
            self._fault(self._level(high - 1), keys.manifest(low + 1), low + 1, missing)

    def _read_compacted(self) -> None:
        names: list[tuple[int | None, int]] = []
        for key in self.bucket.list(keys.COMPACTED):
            name = keys.compacted_of(key)
            if name is None:
                self._fault("warning", key, None, "not the name of a compacted delta")
            else:
                names.append(name)
        read = self._read_all(
            "compacted deltas", lambda n: read_compacted_delta(self.bucket, self.run, *n), names
        )
        for name, compacted in zip(names, read, strict=True):
            key = keys.compacted(*name)
            if isinstance(compacted, CorruptError):
                self._fault("warning", key, name[1], compacted.message)
            if not isinstance(compacted, CompactedDelta):
                continue  # Damaged, or deleted by retention meanwhile.
            ends = [(compacted.version, compacted.digest)]
            ends += [] if compacted.base is None else [(compacted.base, compacted.base_digest)]
            if any(v in self._manifests and self._manifests[v].digest != d for v, d in ends):
                self._fault(
                    "error",
                    key,
                    compacted.version,
                    "it does not connect the versions that it names",
                )
                self._bad.add(key)
            step = self._step(compacted.base, compacted, compacted.payload, key)
            if compacted.base is None:
                self._anchors.setdefault(compacted.version, []).append(step)
                self.found.anchors += 1
                continue
            self._steps.setdefault(compacted.version, []).append(step)
            self._compacted_from.setdefault(compacted.base, []).append(step)
            self.found.compacted += 1

    def _step(
        self, base: int | None, stated: Manifest | CompactedDelta, ref: PayloadRef, key: str
    ) -> StatedStep:
        """Returns a step with its blobs; reports a missing or damaged piece table."""
        step = StatedStep(base, stated, ref, key, table_blobs([ref]))
        try:
            step.blobs.extend(read_blobs(self.bucket, self.run, ref))
        except CorruptError as error:
            # A fault of the report; nothing is changed.
            table = keys.blob(ref.table.blob) if ref.table.blob else key
            self._fault(self._level_of(step), table, stated.version, error.message)
            self._bad.add(table)
        return step

    def _all_steps(self) -> Iterator[StatedStep]:
        for steps in (*self._steps.values(), *self._anchors.values()):
            yield from steps

    def _level_of(self, step: StatedStep) -> Level:
        compacted = isinstance(step.stated, CompactedDelta)
        return "warning" if compacted else self._level(step.stated.version)

    def _check_blobs(self) -> None:
        there = {entry.key: entry.bytes for entry in self.bucket.list_objects(keys.BLOBS)}
        self.found.blobs, self.found.bytes = len(there), sum(there.values())
        wanted: set[str] = set()
        for level, ref, version in self._all_refs():
            wanted.add(keys.blob(ref.hash))
            self._check_blob(level, ref, version, there)
        spare = [size for key, size in there.items() if key not in wanted]
        self.found.unreferenced, self.found.unreferenced_bytes = len(spare), sum(spare)

    def _all_refs(self) -> Iterator[tuple[Level, BlobRef, int | None]]:
        """Yields every blob that an object refers to; those of anchors and deltas last."""
        for file in self.run.model_files:
            yield "error", BlobRef(file.blob, file.bytes), None
        for version, manifest in self._manifests.items():
            for file in manifest.model_files or ():
                yield self._level(version), BlobRef(file.blob, file.bytes), version
        for step in self._all_steps():
            for ref in step.blobs:
                yield self._level_of(step), ref, step.stated.version

    def _check_blob(
        self, level: Level, ref: BlobRef, version: int | None, there: dict[str, int]
    ) -> None:
        key = keys.blob(ref.hash)
        size = there.get(key)
        if size is None:  # It may have been stored after the listing.
            size = self.bucket.size(key)
        if size is None and self._is_above(key, ref):
            return
        if size != ref.bytes:
            what = "missing" if size is None else f"of {size} bytes instead of {ref.bytes}"
            self._fault(level, key, version, f"a blob is {what}")
            self._bad.add(key)

    def _is_above(self, key: str, ref: BlobRef) -> bool:
        """Returns whether a fork reads this blob from its parent, whose listing is another one."""
        if not ref.bytes:
            return False
        try:
            return self.bucket.read_ranges(key, [(ref.bytes - 1, 1)]) is not None
        except CorruptError:
            return False  # It is shorter than its size says: reported as missing.

    def _sound(self, step: StatedStep) -> bool:
        names = [keys.blob(ref.hash) for ref in step.blobs]
        return self._bad.isdisjoint([step.key, *names])

    def _follow(self) -> None:
        """Finds the versions that can be reached, trusting blobs of the right size."""
        for version in self._listed:
            steps = [s for s in self._steps.get(version, ()) if s.base in self._reached]
            for step in (*self._anchors.get(version, ()), *steps):
                if version in self._manifests and self._sound(step):
                    self._reached[version] = step

    def _rebuild(self) -> None:
        """Rebuilds every version in order, in one mirror."""
        mirror = empty_mirror(self.run)
        for number, version in enumerate(self._listed):
            self._progress("versions", number, len(self._listed))
            manifest = self._manifests.get(version)
            if manifest is None or manifest.pruned:
                continue
            self._arrive(version, mirror)
            if mirror.version == version:
                for step in self._compacted_from.get(version, ()):
                    self._try(step, lambda s=step: self._decode(s, mirror))  # type: ignore[misc]
        self._progress("versions", len(self._listed), len(self._listed))

    def _arrive(self, version: int, mirror: Mirror) -> None:
        """Moves the mirror to a version by its deltas and anchors, and checks them all."""
        steps = self._steps.get(version, [])
        for step in steps:
            if isinstance(step.stated, Manifest) and step.base == mirror.version:
                self._try(step, lambda s=step: self._move(s, mirror))  # type: ignore[misc]
        for step in self._anchors.get(version, ()):
            self._try(step, lambda s=step: self._anchor(s, mirror))  # type: ignore[misc]
        for step in steps:
            if mirror.version != version and step.base in self._reached:
                self._try(step, lambda s=step: self._go_around(s, mirror))  # type: ignore[misc]

    def _try(self, step: StatedStep, action: Callable[[], None]) -> None:
        """Checks a step and reports its fault; skips a step that is known to be bad."""
        if not self._sound(step):
            return
        try:
            action()
        except CorruptError as error:
            # A fault of the report; nothing is changed.
            key, version = error.key or step.key, step.stated.version
            self._fault(self._level_of(step), key, version, error.message)
            self._bad.add(key)

    def _go_around(self, step: StatedStep, mirror: Mirror) -> None:
        """Avoids damaged objects as a reader would: returns to the base of a step, and takes that
        step.
        """
        route = [step]
        while route[-1].base is not None and route[-1].base != mirror.version:
            route.append(self._reached[route[-1].base])
        for one in reversed(route):
            if one.base is None:
                fetch_anchor(self.bucket, self.run, one.stated, one.payload, mirror)
            else:
                self._move(one, mirror)

    def _move(self, step: StatedStep, mirror: Mirror) -> None:
        stated = step.stated
        pieces, held = decode_delta(self.bucket, self.run, stated, step.payload, mirror)
        mirror.move(pieces, stated.version, Digest.from_hex(stated.digest), held)
        self._record(step)

    def _decode(self, step: StatedStep, mirror: Mirror) -> None:
        decode_delta(self.bucket, self.run, step.stated, step.payload, mirror)
        self._read |= {ref.hash for ref in step.blobs}

    def _anchor(self, step: StatedStep, mirror: Mirror) -> None:
        """Loads an anchor if the mirror is not at its version yet, otherwise compares the two."""
        stated, payload = step.stated, step.payload
        if mirror.version != stated.version:
            fetch_anchor(self.bucket, self.run, stated, payload, mirror)
            self._record(step)
            return

        def compare(name: str, start: int, bits: Bits) -> None:
            held = mirror.find(name, start, bits.size)
            if held is None or not np.array_equal(held, bits):
                raise CorruptError(
                    f"the anchor's tensor {name} differs from the one that the deltas give",
                    version=stated.version,
                )

        whole = read_for(self.bucket, self.run, stated, payload, mirror)
        decode_anchor(self.bucket, self.run, stated, whole, mirror, compare)
        self._record(step)

    def _record(self, step: StatedStep) -> None:
        """Records that a step leads to its version; an anchor is the shortest way back to one."""
        if step.base is None or step.stated.version not in self._reached:
            self._reached[step.stated.version] = step
        self._read |= {ref.hash for ref in step.blobs}

    def _read_the_rest(self) -> None:
        """Compares the remaining blobs with their names: those of steps from versions that were not
        reached, and of files other than weights.
        """
        rest = {
            ref.hash: (level, ref, version)
            for level, ref, version in self._all_refs()
            if ref.hash not in self._read and keys.blob(ref.hash) not in self._bad
        }
        refs = [ref for _, ref, _ in rest.values()]
        read = self._read_all("other blobs", lambda ref: get_blob(self.bucket, ref), refs)
        for (level, ref, version), data in zip(rest.values(), read, strict=True):
            if isinstance(data, CorruptError):
                self._fault(level, keys.blob(ref.hash), version, data.message)
