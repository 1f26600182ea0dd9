"""Polls a bucket for versions newer than the one held.

One poll requests the next manifest by name. Now and then (`polls_between_listings`), and whenever
the next manifest exists but cannot be read, the poller lists the manifests to find a newer version
that can be reached without it. A reader ignores a manifest that is damaged or not signed by the
run's key: the poller keeps it as its ``alarm`` and reads it again after increasing pauses, because
the damage may be in the store's response and not in the object. A listing that shows nothing newer
is also the occasion to look at the version held: one that was lost, damaged or replaced is an alarm
too, since nobody else could load what this reader goes on serving.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from deltawire.errors import CorruptError, ResyncError
from deltawire.store import Bucket, ObjectMeta
from deltawire.store.request_limit import REFUSING_S, limit_of, refused_ago_s
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.evidence import Absent, Sound, Unknown, evidence_of
from deltawire.sync.chain.objects import (
    committed_objects,
    late_version,
    read_manifest,
    read_run,
)
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

LIST_EVERY_POLLS = 20
"""The number of polls between two listings while the next manifest is missing; it may have been
lost.
"""

LISTED_QUICKLY = 1 << 10
"""A folder is listed whole, so that a listing costs in proportion to its versions: with more than
this many, listings are as much rarer."""

PATIENCE_SHARE = 0.05
"""Pauses grow with the time since the last version: they add at most this share to its age."""

LONGEST_PAUSE = 10.0
"""The longest pause, in multiples of the bucket's own polling interval."""

POLLED = 5.0
"""While the store refuses requests, one of so many that this process may make is a poll."""
LONGEST_REFUSED_PAUSE_S = 60.0

JITTER = 0.25
"""Pauses vary by up to this share, so that many readers do not poll at the same time."""

MOST_AHEAD = 16
"""The most manifests that one poll requests from a network store."""

LONGEST_RECHECK_S = 60.0
"""The longest pause before an unreadable manifest is read again."""


@dataclass
class _Rejected:
    """A version that could not be read: why, how often, and when to read it again. ``manifest`` is
    true if its manifest could be read.
    """

    error: CorruptError
    meta: ObjectMeta | None
    attempts: int
    due: float
    manifest: bool = False


class VersionPoller:
    """Finds the newest readable version of a run above the one held.

    ``read`` replaces `read_manifest`, for a caller that also keeps the manifest's bytes.

    Example::

        poller = VersionPoller(bucket, run)
        while (manifest := poller.newer(held)) is None:
            time.sleep(poller.pause_s)
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        read: Callable[[int], Manifest | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self._read_manifest = read or partial(read_manifest, bucket, run)
        self._clock = clock
        self._rng = rng
        self.found: list[Manifest] = []
        """The consecutive manifests after the version held, as the last poll read them."""
        self._polls = 0
        self._ahead = 1
        self._progress_at = clock()
        self._rejected: dict[int, _Rejected] = {}
        self._run_meta: ObjectMeta | None = None
        self._held: Manifest | None = None
        self._held_alarm: CorruptError | None = None

    @property
    def alarm(self) -> CorruptError | None:
        """The error of the newest listed version that could not be read, or what became of the
        version held; None if all is well."""
        newest = max(self._rejected, default=None)
        return self._held_alarm if newest is None else self._rejected[newest].error

    @property
    def pause_s(self) -> float:
        """Returns how long to sleep before the next poll.

        At least the bucket's polling interval, growing to `LONGEST_PAUSE` times as much while no
        version appears: one that took T seconds to appear is found at most about T/20 later. While
        the store refuses requests, a poll is one of `POLLED` that this process may make.
        """
        shortest = self.bucket.poll_s
        idle_s = self._clock() - self._progress_at
        pause_s = min(max(PATIENCE_SHARE * idle_s, shortest), LONGEST_PAUSE * shortest)
        if not self.bucket.local and refused_ago_s(self.bucket.url) < REFUSING_S:
            request_s = limit_of(self.bucket.url).window.request_s
            pause_s = max(pause_s, min(POLLED * request_s, LONGEST_REFUSED_PAUSE_S))
        return pause_s * (1 - JITTER + 2 * JITTER * self._rng())

    def newer(self, held: int, *, nearest: bool = False) -> Manifest | None:
        """Returns the manifest of the newest readable version above ``held`` (-1: of all); with
        ``nearest``, that of the next version if it is readable. None if there is none.

        Raises `ResyncError` if the bucket holds another run now, `CorruptError` if the run was
        deleted or set back below ``held``, `RetryError` if the store does not answer.
        """
        found = self._next(held, nearest=nearest)
        if found is not None:
            self._progress_at = self._clock()
            self._polls = 0
        return found

    def pass_over(self, version: int, error: CorruptError) -> None:
        """Treats a version as missing for a while, although its manifest can be read."""
        before = self._rejected.get(version)
        attempts = 1 if before is None else before.attempts + 1
        due = self._clock() + min(2.0 ** (attempts - 2), LONGEST_RECHECK_S)
        self._rejected[version] = _Rejected(error, None, attempts, due, manifest=True)

    def _next(self, held: int, *, nearest: bool) -> Manifest | None:
        self._rejected = {v: entry for v, entry in self._rejected.items() if v > held}
        following = self._read_ahead(held, 1 if nearest else self._ahead)
        if self.found:
            newest = self.found[-1]
            missing = len(self.found) < self._ahead
            # The reader will probably lag again, so the next poll requests as many manifests at
            # once.
            self._ahead = 1 if self.bucket.local else min(len(self.found) + 1, MOST_AHEAD)
            if nearest or missing or newest.version + 1 > keys.MAX_NUMBER:
                return newest
            if not self.bucket.exists(keys.manifest(newest.version + 1)):
                return newest
            found = self._newest_listed(held)
            if found is not None and not self.bucket.local:
                self._ahead = min(max(found.version - held, 1) + 1, MOST_AHEAD)
            return found
        self._ahead = max(1, self._ahead - 1)
        self._polls += 1
        nothing = following is None and held + 1 not in self._rejected
        if nothing and self._polls % polls_between_listings(self.bucket, held) != 1:
            return None
        return self._newest_listed(held)

    def _read_ahead(self, held: int, count: int) -> Manifest | None:
        """Reads the manifests after ``held`` until one is missing, into ``found``.

        Returns the first one, which may be pruned.
        """
        versions = range(held + 1, min(held + count, keys.MAX_NUMBER) + 1)
        if len(versions) < 2:
            read = [self._read(version, None) for version in versions]
        else:
            with WorkerThreads(len(versions), thread_name_prefix="version-poller") as readers:
                read = list(readers.map(lambda version: self._read(version, None), versions))
        found = itertools.takewhile(lambda one: one is not None and not one.pruned, read)
        self.found = [one for one in found if one is not None]
        return read[0] if read else None

    def _newest_listed(self, held: int) -> Manifest | None:
        if held < 0 and (late := late_version(self.bucket)):
            # Most runs have a readable version among the newest: do not list all others for it.
            found = self._newest_of(committed_objects(self.bucket, newer_than=late - 1))
            if found is not None:
                return found
        listed = committed_objects(self.bucket, newer_than=held)
        self._rejected = {v: entry for v, entry in self._rejected.items() if v in listed}
        found = self._newest_of(listed)
        if found is not None:
            return found
        if not listed and held >= 0:
            self._check_run(held)
        return None

    def _newest_of(self, listed: Mapping[int, ObjectMeta]) -> Manifest | None:
        for version in sorted(listed, reverse=True):
            manifest = self._read(version, listed[version])
            if manifest is not None and not manifest.pruned:
                return manifest
        return None

    def _read(self, version: int, meta: ObjectMeta | None) -> Manifest | None:
        """Returns a version's manifest, None if it is missing or cannot be read."""
        rejected = self._rejected.get(version)
        if rejected is not None and self._clock() < rejected.due:
            changed = meta is not None and rejected.meta is not None and meta != rejected.meta
            if not changed:
                rejected.meta = meta or rejected.meta
                return None
        try:
            manifest = self._read_manifest(version)
        except CorruptError as error:
            attempts = 1 if rejected is None else rejected.attempts + 1
            pause_s = 0.0 if attempts == 1 else min(2.0 ** (attempts - 2), LONGEST_RECHECK_S)
            self._rejected[version] = _Rejected(error, meta, attempts, self._clock() + pause_s)
            return None
        if rejected is None or not rejected.manifest:
            self._rejected.pop(version, None)
        return manifest

    def _check_run(self, held: int) -> None:
        """Detects a run that was deleted, replaced by another, or set back to older versions."""
        meta = self.bucket.head(keys.RUN)
        if meta != self._run_meta:
            there = read_run(self.bucket, public_key=self.run.public_key)
            if there.id != self.run.id:
                raise ResyncError(
                    "the bucket holds another run now",
                    hint="start again to follow the new run",
                    run=self.bucket.url,
                    key=keys.RUN,
                )
            self._run_meta = meta
        self._held_alarm = self._check_held(held)

    def _check_held(self, held: int) -> CorruptError | None:
        """Returns why nobody else could load the version held now, None if they could.

        Raises `CorruptError` if no version as new is left.
        """
        key = keys.manifest(held)
        found = evidence_of(self.bucket, key, partial(read_manifest, self.bucket, self.run, held))
        if isinstance(found, Unknown):
            return found.error
        if isinstance(found, Absent):
            newest = max(committed_objects(self.bucket), default=None)
            if newest is None or newest < held:
                there_is = "no version" if newest is None else f"version {newest} as its newest"
                raise CorruptError(
                    f"the run was set back: it has {there_is}",
                    hint="was it deleted or restored? start again to load what it holds",
                    run=self.bucket.url,
                    version=held,
                    key=key,
                )
            return self._lost("the manifest of the version held is missing", held)
        before, there = self._held, found.value
        if before is None or before.version != held:
            self._held = there
        elif (before.nonce, before.digest) != (there.nonce, there.digest):
            return self._lost("the version held was replaced by another of its number", held)
        return None

    def _lost(self, message: str, held: int) -> CorruptError:
        return CorruptError(
            message,
            hint="readers that start cannot load what this one serves: publish a newer version",
            run=self.bucket.url,
            version=held,
            key=keys.manifest(held),
        )


def polls_between_listings(bucket: Bucket, held: int) -> int:
    """Returns how many polls of an idle reader at version ``held`` pass between two listings."""
    rarer = held // LISTED_QUICKLY if bucket.local else 0
    return LIST_EVERY_POLLS * max(rarer, 1)


def newest_readable(bucket: Bucket, run: Run) -> Manifest | None:
    """Returns the manifest of the newest version that can be read, None if nothing is committed.

    Reads a damaged manifest again, on other connections, before it falls back to an older version,
    because the store's response may have been at fault. Raises `CorruptError` for the newest one if
    versions exist and none can be read.
    """
    damage: CorruptError | None = None
    above: int | None = None
    for first in (late_version(bucket), 0):
        for version in sorted(committed_objects(bucket, newer_than=first - 1), reverse=True):
            if above is not None and version >= above:
                continue
            read = partial(read_manifest, bucket, run, version)
            found = evidence_of(bucket, keys.manifest(version), read)
            if isinstance(found, Unknown):
                damage = damage or found.error
            if isinstance(found, Sound) and not found.value.pruned:
                return found.value
        above = first
        if first == 0:
            break
    if damage is not None:
        raise damage
    return None
