"""Reads what each version of a run is, from an index and the manifests that are newer.

Without the index, every manifest is read, many at once. Whoever publishes directories writes the
index then, and again after `WRITE_EVERY` versions, so that a start reads one object for a thousand
versions and at most so many manifests. The index is not trusted further than the manifests are: it
is signed in a signed run, and left aside unless its newest version has the digest that its manifest
states, as after a run was set back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from deltawire.errors import CorruptError, DeltawireError
from deltawire.store import REQUESTS, Bucket, in_parallel
from deltawire.sync.chain.objects import (
    check_signed,
    committed_versions,
    files_of,
    read_manifest,
)
from deltawire.wire import keys
from deltawire.wire.identities import (
    MAX_NAME,
    MAX_SEGMENT_BYTES,
    SEGMENT_VERSIONS,
    IdentitySegment,
    VersionIdentity,
    decode_identities,
    files_key,
)
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal

CHECKPOINT_RECORD: Final = "checkpoint"
"""The member of a version's commit metadata that names its source directory."""

WRITE_EVERY = 32
"""Versions that the index may lack before it is written again."""


def identity_of(run: Run, manifest: Manifest) -> VersionIdentity:
    """Returns what a manifest says its version is; a tombstone does not say which files it had."""
    name = manifest.metadata.get(CHECKPOINT_RECORD, "")
    return VersionIdentity(
        manifest.version,
        manifest.digest,
        "" if manifest.pruned else files_key(files_of(run, manifest)),
        name if isinstance(name, str) else "",
    )


class IdentityIndex:
    """The identities of a run's versions, by version, oldest first.

    ``report`` gets the number of manifests read and their total. Damaged manifests are skipped: a
    publisher continues from the newest that can be read.

    Example::

        index = IdentityIndex(bucket, run, signer=signer)
        index.known[3].digest
        index.save()
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        signer: Signer | None = None,
        report: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._bucket = bucket
        self._run = run
        self._signer = signer
        self._unusable: list[int] = []
        """Stored segments that were left aside."""
        self.known: dict[int, VersionIdentity] = self._stored()
        self._saved = max(self.known, default=-1)
        listed = committed_versions(bucket, newer_than=self._saved)
        done = 0
        for window in _windows(listed):
            for manifest in in_parallel(bucket, self._read, window):
                if manifest is not None:
                    self.add(identity_of(run, manifest))
                done += 1
                report(done, len(listed))

    def add(self, identity: VersionIdentity) -> None:
        """Adds a version that was just committed."""
        cut = msgspec.structs.replace(identity, name=identity.name[:MAX_NAME])
        self.known[identity.version] = cut

    def save(self) -> None:
        """Stores the index if it lacks `WRITE_EVERY` versions; without it, a start only takes
        longer, so that no error is raised.
        """
        new = [version for version in self.known if version > self._saved]
        if len(new) < WRITE_EVERY or bool(self._run.public_key) != (self._signer is not None):
            return
        with suppress(DeltawireError):
            # The last one last: readers take its newest version for that of the whole index.
            for segment in sorted({version // SEGMENT_VERSIONS for version in new}):
                key = keys.identities(segment)
                first = segment * SEGMENT_VERSIONS
                versions = [
                    self.known[version]
                    for version in range(first, first + SEGMENT_VERSIONS)
                    if version in self.known
                ]
                found = IdentitySegment(run=self._run.id, segment=segment, versions=versions)
                self._bucket.put(key, seal(found, key=key, signer=self._signer))
            for segment in self._unusable:
                if segment > max(new) // SEGMENT_VERSIONS:
                    self._bucket.delete(keys.identities(segment))
            self._saved, self._unusable = max(new), []

    def _stored(self) -> dict[int, VersionIdentity]:
        """Returns the stored index, empty unless all of it can be read and still holds: one version
        that it lacked would be published again.
        """
        numbers = sorted(
            number
            for key in self._bucket.list(keys.IDENTITIES)
            if (number := keys.trailing_number(key)) is not None and key == keys.identities(number)
        )
        try:
            if numbers != list(range(len(numbers))):
                raise CorruptError("a segment of identities is missing", run=self._bucket.url)
            segments = in_parallel(self._bucket, self._segment, numbers)
            found = {one.version: one for segment in segments for one in segment.versions}
            if not found:
                return {}
            newest = read_manifest(self._bucket, self._run, max(found))
        except CorruptError:
            newest, found = None, {}
        if newest is None or newest.digest != found[newest.version].digest:
            self._unusable = numbers
            return {}
        return found

    def _segment(self, number: int) -> IdentitySegment:
        key = keys.identities(number)
        data = self._bucket.get(key, limit=MAX_SEGMENT_BYTES)
        if data is None:
            raise CorruptError("a segment of identities is missing", run=self._bucket.url, key=key)
        check_signed(self._bucket, self._run, data, key)
        return decode_identities(
            data, segment=number, table=self._run, run=self._bucket.url, key=key
        )

    def _read(self, version: int) -> Manifest | None:
        with suppress(CorruptError):
            return read_manifest(self._bucket, self._run, version)
        return None


def same_kind(known: Mapping[int, VersionIdentity], digest: str, files: str) -> Iterable[int]:
    """Yields the versions with this digest whose files are these, or not known."""
    for version, one in known.items():
        if one.digest == digest and one.files in ("", files):
            yield version


def _windows(versions: list[int]) -> Iterable[list[int]]:
    for at in range(0, len(versions), 4 * REQUESTS):
        yield versions[at : at + 4 * REQUESTS]
