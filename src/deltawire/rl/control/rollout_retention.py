"""Rollout retention: deletes groups that no step, checkpoint or configured rule needs any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from deltawire.errors import CorruptError
from deltawire.runtime.retained import RetainedFile, read_retained
from deltawire.store import Bucket
from deltawire.sync import committed_versions, read_manifest
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.run import Run

DELETERS = 16


class RolloutRetention:
    """Deletes the groups of old versions after a checkpoint.

    Groups of the newest ``keep`` versions stay, and those of every version after the oldest
    checkpoint, from which steps may have to be recomputed. 0 keeps everything. ``retained.json``
    first states from which version on groups are kept, so that an audit does not take deleted
    groups for lost ones; a deletion that was interrupted is completed by the next one.

    Example::

        RolloutRetention(bucket, run, keep=100).trim(newest=500, oldest_checkpoint=420)
    """

    def __init__(
        self, bucket: Bucket, run: Run, *, keep: int, floors: RetainedFile | None = None
    ) -> None:
        self._floors = floors or RetainedFile(bucket)
        self._bucket = bucket
        self._run = run
        self._keep = keep

    def trim(self, *, newest: int, oldest_checkpoint: int) -> int:
        """Deletes what is not kept; returns the number of groups. Raises `RetryError`."""
        floor = min(newest - self._keep, oldest_checkpoint) + 1
        first = read_retained(self._bucket).rollouts
        if not self._keep or floor <= max(first, 1):
            return 0
        self._floors.raise_to(rollouts=floor)
        # The version before the old floor is repeated: its deletion may have been interrupted.
        start = max(first - 1, 1)
        versions = committed_versions(self._bucket, newer_than=start - 1)
        groups = [group for version in versions if version < floor for group in self._of(version)]
        with ThreadPoolExecutor(DELETERS, "rollout-retention") as threads:
            list(threads.map(self._delete, groups))
        return len(groups)

    def _delete(self, group: tuple[str, int]) -> None:
        """Deletes a group and the scores that a reference stored for it."""
        self._bucket.delete(keys.reference(*group))
        self._bucket.delete(keys.rollout(*group))

    def _of(self, version: int) -> list[tuple[str, int]]:
        try:
            manifest = read_manifest(self._bucket, self._run, version)
        except CorruptError:
            return []
        if manifest is None:
            return []
        metadata = CommitMetadata.of(manifest.metadata, run=self._bucket.url, version=version)
        return list(metadata.settled_groups())
