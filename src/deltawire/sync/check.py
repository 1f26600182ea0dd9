"""Checking a run: every object it should have, every bit of it, and every way between versions.

The run may be live: what is committed, retired or folded while the check is under way is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deltawire.codec import Digest
from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain import (
    newest_boundary,
    newest_version,
    read_fold,
    read_manifest,
    read_run,
    with_retries,
)
from deltawire.sync.fetch import decode_anchor, decode_delta
from deltawire.sync.load import fetch_anchor
from deltawire.sync.mirror import Bits, Mirror, empty_mirror
from deltawire.wire import keys
from deltawire.wire.manifest import BlobRef, Fold, Manifest, Payload
from deltawire.wire.run import Run

Level = Literal["error", "warning"]


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
    """What a check found. ``first`` is the oldest version that a relay has carried here, 0 in the
    run's own bucket. ``unreachable`` versions cannot be read in any way."""

    versions: int = 0
    first: int = 0
    newest: int | None = None
    boundary: int = 0
    retired: int = 0
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
    progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Check the run in a bucket. Nothing is written.

    Without ``deep`` blobs are only looked for, by name and size; with it every blob is read, every
    version is rebuilt in two mirrors' memory and held against its digest. ``progress`` is called
    with the versions done and in all. Raises `CorruptError` if there is no readable ``run.json``,
    `RetryError` if the store does not answer.
    """
    run = with_retries(lambda: read_run(bucket, public_key=public_key))
    if run is None:
        raise CorruptError("there is no run", run=bucket.url, key=keys.RUN)
    return _Check(bucket, run, progress).all(deep=deep)


class _Check:
    def __init__(
        self, bucket: Bucket, run: Run, progress: Callable[[int, int], None] | None
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.found = Checked()
        self._progress = progress
        self._manifests: dict[int, Manifest] = {}
        self._folds: list[Fold] = []
        self._bad: set[str] = set()

    def all(self, *, deep: bool) -> Checked:
        found = self.found
        found.newest = with_retries(lambda: newest_version(self.bucket))
        found.boundary = with_retries(lambda: newest_boundary(self.bucket))
        if found.newest is None:
            return found
        found.versions = found.newest + 1
        self._read_manifests(found.newest)
        self._read_folds()
        self._look_for_blobs()
        if deep:
            self._rebuild(found.newest)
        else:
            self._follow(found.newest)
        self._forget_retired()
        return found

    def _forget_retired(self) -> None:
        """Retention that ran meanwhile has made no faults."""
        now = with_retries(lambda: newest_boundary(self.bucket))
        if now <= self.found.boundary:
            return
        self.found.boundary = now
        kept = [f for f in self.found.faults if f.version is None or f.version >= now]
        self.found.faults = kept
        self.found.unreachable = [version for version in self.found.unreachable if version >= now]

    def _fault(self, level: Level, key: str, version: int | None, message: str) -> None:
        if not any(fault.key == key and fault.version == version for fault in self.found.faults):
            self.found.faults.append(Fault(level, key, version, message))

    def _read_manifests(self, newest: int) -> None:
        epoch = 0
        self._find_first(newest)
        for version in range(self.found.first, newest + 1):
            key = keys.manifest(version)
            try:
                manifest = with_retries(lambda v=version: read_manifest(self.bucket, self.run, v))  # type: ignore[misc]
            except CorruptError as error:
                self._fault(self._level(version), key, version, error.message)
                continue
            if manifest is None:
                self._fault(self._level(version), key, version, "the manifest is missing")
                continue
            self._manifests[version] = manifest
            self.found.retired += manifest.retired
            self.found.anchors += manifest.anchor is not None
            base = self._manifests.get(manifest.base) if manifest.base is not None else None
            if base is not None and base.digest != manifest.base_digest:
                self._fault("error", key, version, "it builds on another digest than its base has")
            if not manifest.retired and manifest.epoch < epoch:
                self._fault("error", key, version, "its epoch is below that of the one before")
            epoch = max(epoch, manifest.epoch)

    def _find_first(self, newest: int) -> None:
        """A relay's destination begins with the anchor that the relay began with."""
        numbers = [keys.trailing_number(key) for key in with_retries(self._list_manifests)]
        first = min((number for number in numbers if number is not None), default=0)
        if not self.found.boundary < first <= newest:
            return
        try:
            manifest = with_retries(lambda: read_manifest(self.bucket, self.run, first))
        except CorruptError:
            return
        if manifest is not None and manifest.anchor is not None:
            self.found.first = first
            self._fault(
                "warning",
                keys.manifest(first - 1),
                None,
                f"nothing below version {first} is here: a relay began with it, or it was lost",
            )

    def _list_manifests(self) -> list[str]:
        return self.bucket.list(keys.MANIFESTS)

    def _level(self, version: int) -> Level:
        """What is below the boundary is nobody's any more."""
        return "error" if version >= self.found.boundary else "warning"

    def _read_folds(self) -> None:
        for key in with_retries(lambda: self.bucket.list(keys.FOLDS)):
            name = keys.fold_of(key)
            if name is None:
                self._fault("warning", key, None, "not the name of a fold")
                continue
            try:
                fold = with_retries(lambda n=name: read_fold(self.bucket, self.run, *n))  # type: ignore[misc]
            except CorruptError as error:
                self._fault("warning", key, name[1], error.message)
                continue
            if fold is None:
                continue  # Retention took it meanwhile.
            ends = [(fold.version, fold.digest)]
            ends += [] if fold.base is None else [(fold.base, fold.base_digest)]
            if any(v in self._manifests and self._manifests[v].digest != d for v, d in ends):
                self._fault("error", key, fold.version, "it does not join the versions it names")
                self._bad.add(key)
            self._folds.append(fold)
            self.found.folds += 1

    def _payloads(self) -> Iterator[tuple[str, int, Level, Payload]]:
        for version, manifest in self._manifests.items():
            for payload in (manifest.delta, manifest.anchor):
                if payload is not None:
                    yield keys.manifest(version), version, self._level(version), payload
        for fold in self._folds:
            yield keys.fold(fold.base, fold.version), fold.version, "warning", fold.payload

    def _look_for_blobs(self) -> None:
        there = {e.key: e.bytes for e in with_retries(lambda: self.bucket.entries(keys.BLOBS))}
        self.found.blobs, self.found.bytes = len(there), sum(there.values())
        wanted = {keys.blob(file.blob) for file in self.run.model_files}
        for file in self.run.model_files:
            self._look("error", BlobRef(file.blob, file.bytes), None, there)
        for version, manifest in self._manifests.items():
            for file in manifest.model_files or ():
                wanted.add(keys.blob(file.blob))
                self._look(self._level(version), BlobRef(file.blob, file.bytes), version, there)
        for _, version, level, payload in self._payloads():
            for ref in payload.blobs:
                wanted.add(keys.blob(ref.hash))
                self._look(level, ref, version, there)
        spare = [size for key, size in there.items() if key not in wanted]
        self.found.unreferenced, self.found.unreferenced_bytes = len(spare), sum(spare)

    def _look(self, level: Level, ref: BlobRef, version: int | None, there: dict[str, int]) -> None:
        key = keys.blob(ref.hash)
        size = there.get(key)
        if size is None:  # Perhaps it came behind the listing.
            size = with_retries(lambda: self.bucket.size(key))
        if size != ref.bytes:
            what = "missing" if size is None else f"of {size} bytes and not {ref.bytes}"
            self._fault(level, key, version, f"a blob is {what}")
            self._bad.add(key)

    def _follow(self, newest: int) -> None:
        """Which versions can be reached, by what was looked at and not by their bits."""
        reached: set[int] = set()
        for version in range(newest + 1):
            steps: list[tuple[int | None, str, Payload]] = [
                (fold.base, keys.fold(fold.base, fold.version), fold.payload)
                for fold in self._folds
                if fold.version == version
            ]
            manifest = self._manifests.get(version)
            if manifest is not None and manifest.delta is not None:
                steps.append((manifest.base, keys.manifest(version), manifest.delta))
            if manifest is not None and manifest.anchor is not None:
                steps.append((None, keys.manifest(version), manifest.anchor))
            if manifest is not None and any(
                (base is None or base in reached) and key not in self._bad and self._sound(payload)
                for base, key, payload in steps
            ):
                reached.add(version)
        self._tell_unreachable(reached, newest)

    def _sound(self, payload: Payload) -> bool:
        return not any(keys.blob(ref.hash) in self._bad for ref in payload.blobs)

    def _tell_unreachable(self, reached: set[int], newest: int) -> None:
        for version in range(max(self.found.boundary, self.found.first), newest + 1):
            if version not in reached:
                self.found.unreachable.append(version)
                self._fault("error", "", version, "nothing leads to this version")

    def _rebuild(self, newest: int) -> None:
        """Every version, from the ones before, in one mirror that moves along."""
        reached: dict[int, None] = {}
        mirror = empty_mirror(self.run)
        for version in range(newest + 1):
            if self._progress is not None:
                self._progress(version, newest + 1)
            manifest = self._manifests.get(version)
            if manifest is None or manifest.retired:
                continue
            if self._arrive(manifest, mirror):
                reached[version] = None
            if mirror.version == version:
                self._check_folds_from(version, mirror)
        if self._progress is not None:
            self._progress(newest + 1, newest + 1)
        self._tell_unreachable(set(reached), newest)

    def _arrive(self, manifest: Manifest, mirror: Mirror) -> bool:
        """Bring the mirror to a version by its delta, its anchors or a fold, and check them all."""
        key, level = keys.manifest(manifest.version), self._level(manifest.version)
        delta = manifest.delta
        if delta is not None and manifest.base == mirror.version:
            self._try(level, key, manifest.version, lambda: _step(self, manifest, delta, mirror))
        anchors: list[tuple[Manifest | Fold, Payload, str]] = [
            (fold, fold.payload, keys.fold(None, fold.version))
            for fold in self._folds
            if fold.version == manifest.version and fold.base is None
        ]
        if manifest.anchor is not None:
            anchors.insert(0, (manifest, manifest.anchor, key))
        for step, payload, where in anchors:
            self._try(
                level,
                where,
                manifest.version,
                lambda s=step, p=payload: _whole(self, s, p, mirror),  # type: ignore[misc]
            )
        return mirror.version == manifest.version or self._by_survey(manifest, mirror)

    def _by_survey(self, manifest: Manifest, mirror: Mirror) -> bool:
        """Around what is damaged, as a reader would."""
        from deltawire.sync.load import load_mirror

        try:
            load_mirror(self.bucket, self.run, at=manifest.version, into=mirror)
        except CorruptError:
            return False
        return True

    def _check_folds_from(self, version: int, mirror: Mirror) -> None:
        for fold in self._folds:
            if fold.base == version:
                self._try(
                    "warning",
                    keys.fold(fold.base, fold.version),
                    fold.version,
                    lambda f=fold: _dry(self, f, mirror),  # type: ignore[misc]
                )

    def _try(self, level: Level, key: str, version: int, action: Callable[[], None]) -> None:
        try:
            with_retries(action)
        except CorruptError as error:
            self._fault(level, error.key or key, version, error.message)


def _step(check: _Check, manifest: Manifest, payload: Payload, mirror: Mirror) -> None:
    pieces, held = decode_delta(check.bucket, check.run, manifest, payload, mirror)
    mirror.move(pieces, manifest.version, Digest.from_hex(manifest.digest), held)


def _dry(check: _Check, fold: Fold, mirror: Mirror) -> None:
    decode_delta(check.bucket, check.run, fold, fold.payload, mirror)


def _whole(check: _Check, step: Manifest | Fold, payload: Payload, mirror: Mirror) -> None:
    """An anchor: taken up if the mirror is not there yet, else compared with it."""
    if mirror.version != step.version:
        fetch_anchor(check.bucket, check.run, step, payload, mirror)
        return

    def compare(name: str, start: int, bits: Bits) -> None:
        held = mirror.find(name, start, bits.size)
        if held is None or not np.array_equal(held, bits):
            raise CorruptError(
                f"the anchor's tensor {name} is not what the deltas lead to", version=step.version
            )

    decode_anchor(check.bucket, check.run, step, payload, mirror, compare)
