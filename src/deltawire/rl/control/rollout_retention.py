"""Rollout retention: deletes groups that no step, checkpoint or configured rule needs any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from deltawire.runtime.retained import RetainedFile
from deltawire.store import Bucket
from deltawire.store.parallel import REQUESTS, in_parallel
from deltawire.sync import read_manifest
from deltawire.sync.chain.evidence import Sound
from deltawire.sync.chain.history import evidence_of_version
from deltawire.sync.chain.objects import versions_listed_twice
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.run import Run

TRIM_S = 10.0
"""Seconds after which a trim ends with the version under way."""


class RolloutRetention:
    """Deletes the groups of old versions after a checkpoint.

    Groups of the newest ``keep`` versions stay, and those of every version after the oldest
    checkpoint, from which steps may have to be recomputed. 0 keeps everything. Groups that versions
    of a kept interval consumed stay too, below the floor. ``retained.json``
    first states from which version on groups are kept, version by version, so that an audit does
    not take deleted groups for lost ones; a deletion that was interrupted is completed by the next
    one. A trim that takes longer than `TRIM_S`, as the first of a long run does, is continued by
    the next one too: the trainer waits for it.

    Example::

        RolloutRetention(bucket, run, keep=100).trim(newest=500, oldest_checkpoint=420)
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        keep: int,
        floors: RetainedFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._floors = floors or RetainedFile(bucket)
        self._bucket = bucket
        self._run = run
        self._keep = keep
        self._clock = clock

    def trim(
        self,
        *,
        newest: int,
        oldest_checkpoint: int,
        intervals: Collection[tuple[int, int]] = (),
    ) -> int:
        """Deletes what is not kept; returns the number of groups. ``intervals`` are those that are
        kept, each as the versions at its ends. Raises `RetryError`, and `UnreadableError` if the
        floors cannot be read."""
        floor = min(newest - self._keep, oldest_checkpoint) + 1
        if not self._keep or floor <= 1 or floor < (first := self._floors.read().rollouts):
            return 0
        # The version before the old floor is repeated: its deletion may have been interrupted.
        start = max(first - 1, 1)
        listed = versions_listed_twice(self._bucket, newer_than=start - 1)
        versions = [version for version in listed if version < floor]
        deleted, began = 0, self._clock()
        for place in range(0, len(versions), REQUESTS):
            part = versions[place : place + REQUESTS]
            for version, groups in zip(
                part, in_parallel(self._bucket, partial(self._of, intervals), part), strict=True
            ):
                if self._clock() - began > TRIM_S:
                    return deleted
                self._floors.raise_to(rollouts=version + 1)
                in_parallel(self._bucket, self._delete, groups)
                deleted += len(groups)
        self._floors.raise_to(rollouts=floor)
        return deleted

    def _delete(self, group: tuple[str, int]) -> None:
        """Deletes a group and the scores that a reference stored for it."""
        self._bucket.delete(keys.reference(*group))
        self._bucket.delete(keys.rollout(*group))

    def drop(self, version: int) -> None:
        """Deletes the groups of a version below the floor, of an interval that was kept before."""
        in_parallel(self._bucket, self._delete, self._of((), version))

    @property
    def floor(self) -> int:
        """Returns the first version whose groups all are kept. Raises as `trim`."""
        return self._floors.read().rollouts

    def _of(self, intervals: Collection[tuple[int, int]], version: int) -> list[tuple[str, int]]:
        """Returns the groups that a version settled, without those that it consumed in one of the
        ``intervals``. Raises `UnreadableError` if it cannot be read:
        the floor would rise above it, and its groups would stay for good."""
        read = partial(read_manifest, self._bucket, self._run, version)
        found = evidence_of_version(self._bucket, self._run, version, read)
        if not isinstance(found, Sound):
            return []
        metadata = CommitMetadata.of(found.value.metadata, run=self._bucket.url, version=version)
        if any(origin < version <= last for origin, last in intervals):
            return list(metadata.dropped_groups())
        return list(metadata.settled_groups())
