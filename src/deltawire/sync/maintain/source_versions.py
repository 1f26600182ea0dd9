"""Finds the next version that a relay copies, and its manifest's bytes.

A number is passed over by the rule of readers: if the store says twice that there is no such
version, or if a later version says so, because it builds on an earlier one, was pruned or has an
anchor. A manifest that cannot be read and that later versions build on is none of these. The relay
then waits, says so in its alarm, and asks again: a version that it passed over would never be
copied, and its readers would stay where they are until the next anchor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from deltawire.errors import CorruptError, DeltawireError, UnreadableError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import Absent, Sound, Unknown, evidence_of, unreadable
from deltawire.sync.chain.objects import check_signed, committed_versions, later_anchors
from deltawire.sync.chain.version_poller import LONGEST_RECHECK_S, VersionPoller
from deltawire.wire import keys
from deltawire.wire.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from deltawire.wire.run import Run


class SourceVersions:
    """The versions at the source of a relay; ``count`` is told the bytes of each manifest read.

    ``blocked`` is the error of a version that cannot be read and must not be passed over, None if
    there is none.

    Example::

        versions = SourceVersions(source, run, count=copies.count)
        data, manifest = versions.after(7)
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        count: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.blocked: UnreadableError | None = None
        self._count = count
        self._clock = clock
        self._poller = VersionPoller(bucket, run, read=self._read)
        self._data: dict[int, bytes] = {}
        self._passed: CorruptError | None = None
        self._builds: set[int] = set()
        """Later versions that were read and build on the one that cannot be read."""
        self._attempts = 0
        self._due = 0.0

    @property
    def alarm(self) -> DeltawireError | None:
        """The reason why a manifest could not be read, None if all could. Of one that was passed
        over it stays."""
        return self.blocked or self._poller.alarm or self._passed

    @property
    def pause_s(self) -> float:
        """How long to wait before the next call of `after` that found nothing."""
        return self._poller.pause_s

    def after(self, held: int, *, passing: bool = True) -> tuple[bytes, Manifest] | None:
        """Returns the next version above ``held`` that can be read, None if there is none yet, or
        if an earlier one cannot be read and must not be passed over; without ``passing`` none may
        be. Raises `RetryError` if the store does not answer."""
        self._data.clear()
        if self.blocked is not None and self._clock() < self._due:
            return None
        newest = self._poller.newer(held, nearest=True)
        if newest is not None and newest.version == held + 1:
            self._unblock()
            return self._data[newest.version], newest
        return None if newest is None else self._next_listed(held, passing=passing)

    def tombstone(self, version: int) -> bytes | None:
        """Returns the bytes of a version's tombstone, None if it has none; raises
        `UnreadableError`."""
        key = keys.manifest(version)
        found = evidence_of(self.bucket, key, partial(self._read, version))
        if isinstance(found, Unknown):
            raise unreadable(self.bucket, key, found.error)
        data = self._data.pop(version, None)
        return data if isinstance(found, Sound) and found.value.pruned else None

    def _next_listed(self, held: int, *, passing: bool) -> tuple[bytes, Manifest] | None:
        """The next one is missing or cannot be read, or only a bad answer said so."""
        listed = committed_versions(self.bucket, newer_than=held)
        unread: dict[int, CorruptError] = {}
        for version in listed:
            found = self._evidence(version)
            if isinstance(found, Unknown):
                unread[version] = found.error
            if not isinstance(found, Sound):
                continue
            manifest = found.value
            if not unread and _needs(manifest, held) and manifest.base not in listed:
                # A listing may have left out the version that this one builds on.
                assert manifest.base is not None
                base = self._evidence(manifest.base)
                if isinstance(base, Sound):
                    return self._taken(base.value)
                if isinstance(base, Unknown):
                    unread[manifest.base] = base.error
            if unread and not (passing and self._leads_past(manifest, held, listed)):
                self._block(*next(iter(unread.items())))
                return None
            self._passed = next(iter(unread.values()), self._passed)
            return self._taken(manifest)
        return None

    def _leads_past(self, first: Manifest, held: int, listed: list[int]) -> bool:
        """Returns whether a reader of ``held`` gets to ``first`` or beyond without what cannot be
        read before ``first``: no version is there, or an anchor follows."""
        if not _needs(first, held) or later_anchors(self.bucket, newer_than=first.version - 1):
            return True
        for version in listed:
            if version <= first.version or version in self._builds:
                continue
            found = self._evidence(version)
            if isinstance(found, Sound):
                if found.value.pruned or found.value.anchor is not None:
                    return True
                self._builds.add(version)
        return False

    def _evidence(self, version: int) -> Sound[Manifest] | Absent | Unknown:
        return evidence_of(self.bucket, keys.manifest(version), partial(self._read, version))

    def _taken(self, manifest: Manifest) -> tuple[bytes, Manifest]:
        self._unblock()
        return self._data[manifest.version], manifest

    def _block(self, version: int, error: CorruptError) -> None:
        so = "it and later versions are not copied"
        self.blocked = unreadable(self.bucket, keys.manifest(version), error, so=so)
        self._due = self._clock() + min(self.bucket.poll_s * 2**self._attempts, LONGEST_RECHECK_S)
        self._attempts += 1

    def _unblock(self) -> None:
        self.blocked, self._attempts = None, 0
        self._builds.clear()

    def _read(self, version: int) -> Manifest | None:
        """Reads a manifest, and keeps its bytes in ``_data``."""
        key = keys.manifest(version)
        data = self.bucket.get(key, limit=MAX_MANIFEST_BYTES)
        if data is None:
            return None
        check_signed(self.bucket, self.run, data, key)
        manifest = decode_manifest(
            data, version=version, table=self.run, run=self.bucket.url, key=key
        )
        self._count(len(data))
        self._data[version] = data
        return manifest


def _needs(manifest: Manifest, held: int) -> bool:
    """Returns whether a version builds on one above ``held``, and no anchor leads to it."""
    if manifest.pruned or manifest.anchor is not None:
        return False
    return manifest.base is not None and manifest.base > held
