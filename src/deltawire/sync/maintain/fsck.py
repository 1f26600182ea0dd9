"""Checking a run: every object it should have, every bit of it, and every way between versions.

The run may be live: what is committed, pruned or folded while the check is under way is no fault.

One pass, in the order of versions, with one mirror that moves along: each manifest, fold and blob
is read once, however much of them is damaged. A version counts as reached if a sound anchor, or a
sound step from a version that was reached, leads to it; only where the mirror has moved past the
base of a fold that is needed is something fetched a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    committed_versions,
    get_blob,
    newest_retention_floor,
    newest_version,
    read_compacted_delta,
    read_manifest,
    read_run,
    with_retries,
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
"""So many small objects are read at a time from a store that is not at hand."""


class Step(NamedTuple):
    """A way to a version from ``base`` (None: from nothing), the object at ``key`` that states it,
    its payload, and the blobs that it needs."""

    base: int | None
    stated: Manifest | CompactedDelta
    payload: PayloadRef
    key: str
    blobs: list[BlobRef]


@dataclass(frozen=True)
class Fault:
    """Something missing or wrong. A ``warning`` costs readers bytes; an ``error`` costs them a
    version."""

    level: Level
    key: str
    version: int | None
    message: str


@dataclass
class Checked:
    """What a check found. ``first`` is the oldest version that is here: where a relay began, 0 in
    the run's own bucket. ``unreachable`` versions cannot be read in any way."""

    versions: int = 0
    first: int = 0
    newest: int | None = None
    boundary: int = 0
    pruned: int = 0
    anchors: int = 0
    folds: int = 0
    blobs: int = 0
    bytes: int = 0
    unreferenced: int = 0
    unreferenced_bytes: int = 0
    unreachable: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether every version that should be readable is."""
        return not any(fault.level == "error" for fault in self.faults)


def check_run(
    bucket: Bucket,
    *,
    deep: bool = True,
    public_key: str = "",
    progress: Progress | None = None,
) -> Checked:
    """Check the run in a bucket. Nothing is written.

    Without ``deep`` blobs are only looked for, by name and size; with it every blob is read, every
    version is rebuilt in a mirror's memory and held against its digest. ``progress`` is called
    with what is being checked, how many are done and how many there are in all. Raises
    `CorruptError` if there is no readable ``run.json``, `InputError` if there is no run at all,
    `RetryError` if the store does not answer.
    """
    run = with_retries(lambda: read_run(bucket, public_key=public_key))
    if run is None:
        if with_retries(lambda: newest_version(bucket)) is None:
            raise InputError("there is no run here", hint="is the path right?", run=bucket.url)
        raise CorruptError("a run's versions are here without it", run=bucket.url, key=keys.RUN)
    return _Check(bucket, run, progress or _silent).all(deep=deep)


def _silent(*_: object) -> None:
    pass


class _Check:
    def __init__(self, bucket: Bucket, run: Run, progress: Progress) -> None:
        self.bucket = bucket
        self.run = run
        self.found = Checked()
        self._progress = progress
        self._manifests: dict[int, Manifest] = {}
        self._steps: dict[int, list[Step]] = {}
        """By target: the delta and the folds that lead there from another version."""
        self._anchors: dict[int, list[Step]] = {}
        self._folds_from: dict[int, list[Step]] = {}
        self._bad: set[str] = set()
        """Blobs that are missing or damaged, and folds that do not join their versions."""
        self._read: set[str] = set()
        """Blobs whose content is what their name says."""
        self._told: set[tuple[str, int | None]] = set()
        self._way: dict[int, Step] = {}
        """By version: what led there. Those that are in it have been reached."""

    def all(self, *, deep: bool) -> Checked:
        found = self.found
        found.boundary = with_retries(lambda: newest_retention_floor(self.bucket))
        versions = self._list_versions()
        if not versions:
            return found
        newest = found.newest = max(versions)
        found.versions = newest + 1
        self._read_manifests(versions)
        self._read_folds()
        self._look_for_blobs()
        if deep:
            self._rebuild(newest)
            self._read_the_rest()
        else:
            self._follow(newest)
        for version in range(max(found.boundary, found.first), newest + 1):
            if version not in self._way:
                found.unreachable.append(version)
                self._fault("error", "", version, "nothing leads to this version")
        self._forget_pruned()
        return found

    def _forget_pruned(self) -> None:
        """Retention that ran meanwhile has made no faults."""
        now = with_retries(lambda: newest_retention_floor(self.bucket))
        if now <= self.found.boundary:
            return
        self.found.boundary = now
        kept = [f for f in self.found.faults if f.version is None or f.version >= now]
        self.found.faults = kept
        self.found.unreachable = [version for version in self.found.unreachable if version >= now]

    def _fault(self, level: Level, key: str, version: int | None, message: str) -> None:
        if (key, version) not in self._told:
            self._told.add((key, version))
            self.found.faults.append(Fault(level, key, version, message))

    def _level(self, version: int) -> Level:
        """What is below the boundary is nobody's any more."""
        return "error" if version >= self.found.boundary else "warning"

    def _read_all(self, what: str, read: Callable[[T], object], items: list[T]) -> Iterator[object]:
        """What ``read`` makes of each item, in order, or the `CorruptError` that it raised."""

        def one(item: T) -> object:
            try:
                return with_retries(lambda: read(item))
            except CorruptError as error:
                return error

        readers = 1 if self.bucket.local else READERS
        with ThreadPoolExecutor(readers, thread_name_prefix="checker") as pool:
            for done, result in enumerate(in_order(pool, one, items, ahead=2 * readers)):
                self._progress(what, done, len(items))
                yield result
        self._progress(what, len(items), len(items))

    def _list_versions(self) -> set[int]:
        return set(with_retries(lambda: committed_versions(self.bucket)))

    def _read_manifests(self, versions: set[int]) -> None:
        self.found.first = min(versions)
        if self.found.first > self.found.boundary:
            self._fault(
                "error",
                keys.manifest(self.found.first - 1),
                None,
                f"nothing below version {self.found.first} is here, and no boundary closes it",
            )
        wanted = list(range(self.found.first, max(versions) + 1))
        epoch = 0
        read = self._read_all(
            "manifests", lambda v: read_manifest(self.bucket, self.run, v), wanted
        )
        for version, manifest in zip(wanted, read, strict=True):
            key, level = keys.manifest(version), self._level(version)
            if isinstance(manifest, CorruptError):
                self._fault(level, key, version, manifest.message)
            if manifest is None:
                self._fault(level, key, version, "the manifest is missing")
            if not isinstance(manifest, Manifest):
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
                self._fault("error", key, version, "it builds on another digest than its base has")
            if not manifest.pruned and manifest.epoch < epoch:
                self._fault("error", key, version, "its epoch is below that of the one before")
            epoch = max(epoch, manifest.epoch)

    def _read_folds(self) -> None:
        names: list[tuple[int | None, int]] = []
        for key in with_retries(lambda: self.bucket.list(keys.COMPACTED)):
            name = keys.compacted_of(key)
            if name is None:
                self._fault("warning", key, None, "not the name of a fold")
            else:
                names.append(name)
        read = self._read_all(
            "folds", lambda n: read_compacted_delta(self.bucket, self.run, *n), names
        )
        for name, fold in zip(names, read, strict=True):
            key = keys.compacted(*name)
            if isinstance(fold, CorruptError):
                self._fault("warning", key, name[1], fold.message)
            if not isinstance(fold, CompactedDelta):
                continue  # Damaged, or retention took it meanwhile.
            ends = [(fold.version, fold.digest)]
            ends += [] if fold.base is None else [(fold.base, fold.base_digest)]
            if any(v in self._manifests and self._manifests[v].digest != d for v, d in ends):
                self._fault("error", key, fold.version, "it does not join the versions it names")
                self._bad.add(key)
            step = self._step(fold.base, fold, fold.payload, key)
            if fold.base is None:
                self._anchors.setdefault(fold.version, []).append(step)
            else:
                self._steps.setdefault(fold.version, []).append(step)
                self._folds_from.setdefault(fold.base, []).append(step)
            self.found.folds += 1

    def _step(
        self, base: int | None, stated: Manifest | CompactedDelta, ref: PayloadRef, key: str
    ) -> Step:
        """A step with its blobs; one whose piece table is missing or damaged is a fault."""
        step = Step(base, stated, ref, key, table_blobs([ref]))
        try:
            step.blobs.extend(with_retries(lambda: read_blobs(self.bucket, self.run, ref)))
        except CorruptError as error:
            table = keys.blob(ref.table.blob) if ref.table.blob else key
            self._fault(self._level_of(step), table, stated.version, error.message)
            self._bad.add(table)
        return step

    def _all_steps(self) -> Iterator[Step]:
        for steps in (*self._steps.values(), *self._anchors.values()):
            yield from steps

    def _level_of(self, step: Step) -> Level:
        fold = isinstance(step.stated, CompactedDelta)
        return "warning" if fold else self._level(step.stated.version)

    def _look_for_blobs(self) -> None:
        there = {e.key: e.bytes for e in with_retries(lambda: self.bucket.list_objects(keys.BLOBS))}
        self.found.blobs, self.found.bytes = len(there), sum(there.values())
        wanted: set[str] = set()
        for level, ref, version in self._all_refs():
            wanted.add(keys.blob(ref.hash))
            self._look(level, ref, version, there)
        spare = [size for key, size in there.items() if key not in wanted]
        self.found.unreferenced, self.found.unreferenced_bytes = len(spare), sum(spare)

    def _all_refs(self) -> Iterator[tuple[Level, BlobRef, int | None]]:
        """Every blob that something refers to; those of anchors, deltas and folds last."""
        for file in self.run.model_files:
            yield "error", BlobRef(file.blob, file.bytes), None
        for version, manifest in self._manifests.items():
            for file in manifest.model_files or ():
                yield self._level(version), BlobRef(file.blob, file.bytes), version
        for step in self._all_steps():
            for ref in step.blobs:
                yield self._level_of(step), ref, step.stated.version

    def _look(self, level: Level, ref: BlobRef, version: int | None, there: dict[str, int]) -> None:
        key = keys.blob(ref.hash)
        size = there.get(key)
        if size is None:  # Perhaps it came behind the listing.
            size = with_retries(lambda: self.bucket.size(key))
        if size != ref.bytes:
            what = "missing" if size is None else f"of {size} bytes and not {ref.bytes}"
            self._fault(level, key, version, f"a blob is {what}")
            self._bad.add(key)

    def _sound(self, step: Step) -> bool:
        names = [keys.blob(ref.hash) for ref in step.blobs]
        return self._bad.isdisjoint([step.key, *names])

    def _follow(self, newest: int) -> None:
        """Which versions can be reached, by what was looked at and not by their bits."""
        for version in range(self.found.first, newest + 1):
            steps = [s for s in self._steps.get(version, ()) if s.base in self._way]
            for step in (*self._anchors.get(version, ()), *steps):
                if version in self._manifests and self._sound(step):
                    self._way[version] = step

    def _rebuild(self, newest: int) -> None:
        """Every version, from the ones before, in one mirror that moves along."""
        mirror = empty_mirror(self.run)
        for version in range(self.found.first, newest + 1):
            self._progress("versions", version, newest + 1)
            manifest = self._manifests.get(version)
            if manifest is None or manifest.pruned:
                continue
            self._arrive(version, mirror)
            if mirror.version == version:
                for step in self._folds_from.get(version, ()):
                    self._try(step, lambda s=step: self._dry(s, mirror))  # type: ignore[misc]
        self._progress("versions", newest + 1, newest + 1)

    def _arrive(self, version: int, mirror: Mirror) -> None:
        """Bring the mirror to a version by its delta, its anchors or a fold, and check them all."""
        steps = self._steps.get(version, [])
        for step in steps:
            if isinstance(step.stated, Manifest) and step.base == mirror.version:
                self._try(step, lambda s=step: self._move(s, mirror))  # type: ignore[misc]
        for step in self._anchors.get(version, ()):
            self._try(step, lambda s=step: self._whole(s, mirror))  # type: ignore[misc]
        for step in steps:
            if mirror.version != version and step.base in self._way:
                self._try(step, lambda s=step: self._go(s, mirror))  # type: ignore[misc]

    def _try(self, step: Step, action: Callable[[], None]) -> None:
        """Take a step, and say what is wrong with it; one that is known to be is not taken."""
        if not self._sound(step):
            return
        try:
            with_retries(action)
        except CorruptError as error:
            key, version = error.key or step.key, step.stated.version
            self._fault(self._level_of(step), key, version, error.message)
            self._bad.add(key)

    def _go(self, step: Step, mirror: Mirror) -> None:
        """Around what is damaged, as a reader would: to the base of a step, if the mirror is not
        there any more, and over it."""
        way = [step]
        while way[-1].base is not None and way[-1].base != mirror.version:
            way.append(self._way[way[-1].base])
        for one in reversed(way):
            if one.base is None:
                fetch_anchor(self.bucket, self.run, one.stated, one.payload, mirror)
            else:
                self._move(one, mirror)

    def _move(self, step: Step, mirror: Mirror) -> None:
        stated = step.stated
        pieces, held = decode_delta(self.bucket, self.run, stated, step.payload, mirror)
        mirror.move(pieces, stated.version, Digest.from_hex(stated.digest), held)
        self._took(step)

    def _dry(self, step: Step, mirror: Mirror) -> None:
        decode_delta(self.bucket, self.run, step.stated, step.payload, mirror)
        self._read |= {ref.hash for ref in step.blobs}

    def _whole(self, step: Step, mirror: Mirror) -> None:
        """An anchor: taken up if the mirror is not there yet, else compared with it."""
        stated, payload = step.stated, step.payload
        if mirror.version != stated.version:
            fetch_anchor(self.bucket, self.run, stated, payload, mirror)
            self._took(step)
            return

        def compare(name: str, start: int, bits: Bits) -> None:
            held = mirror.find(name, start, bits.size)
            if held is None or not np.array_equal(held, bits):
                raise CorruptError(
                    f"the anchor's tensor {name} is not what the deltas lead to",
                    version=stated.version,
                )

        whole = read_for(self.bucket, self.run, stated, payload, mirror)
        decode_anchor(self.bucket, self.run, stated, whole, mirror, compare)
        self._took(step)

    def _took(self, step: Step) -> None:
        """An anchor is the shortest way back to a version."""
        if step.base is None or step.stated.version not in self._way:
            self._way[step.stated.version] = step
        self._read |= {ref.hash for ref in step.blobs}

    def _read_the_rest(self) -> None:
        """Blobs that rebuilding had no use for, by their names: of steps from versions that are
        not reached, and of files beside the weights."""
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
