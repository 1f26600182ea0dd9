"""User groups: which versions consumed a user's groups, by one read of each manifest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from deltawire.store import Bucket, in_parallel
from deltawire.sync import read_manifest
from deltawire.sync.chain.evidence import Sound, listed_twice
from deltawire.sync.chain.history import evidence_of_version
from deltawire.sync.chain.objects import versions_listed_twice
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

READERS = 16
"""Manifests that are read at a time."""

Place = tuple[str, int]
"""A group: its worker and its sequence number."""


class Trained(NamedTuple):
    """A version whose step consumed a group; ``stated`` are the digits by which its manifest names
    the group's bytes, empty if it does not."""

    group: Place
    version: int
    stated: str


class UserGroups:
    """Tells what the versions of a run did with these ``groups``.

    ``settled`` groups were consumed or dropped; ``trained`` lists those that a step consumed.
    `update` reads the manifests of the versions that are new since the last call.

    Example::

        groups = UserGroups(bucket, run, [("live", 0)])
        groups.update()
        groups.trained[0].version
    """

    def __init__(self, bucket: Bucket, run: Run, groups: Iterable[Place]) -> None:
        self.settled: set[Place] = set()
        self.trained: list[Trained] = []
        self._bucket = bucket
        self._run = run
        self._groups = set(groups)
        self._read_to = -1

    def update(self) -> None:
        """Reads the manifests that are new, `READERS` at a time.

        Raises `UnreadableError` for one that cannot be read, because it may name a group.
        """
        if not self._groups:
            return
        versions = versions_listed_twice(self._bucket, newer_than=self._read_to)
        for start in range(0, len(versions), READERS):
            part = versions[start : start + READERS]
            for manifest in in_parallel(self._bucket, self._manifest, part, at_once=READERS):
                if manifest is not None:
                    self._add(manifest)
        self._read_to = max([self._read_to, *versions])

    def needed_by_a_trainer(self) -> set[Place]:
        """Returns the groups of versions above the newest checkpoint: a trainer that starts again
        computes their steps again. Without a checkpoint it starts from version 0, and needs all.
        """
        stored = [
            version
            for key in listed_twice(self._bucket, keys.CHECKPOINTS)
            if (version := keys.trailing_number(key.rpartition("/")[0])) is not None
            and key == keys.checkpoint_commit(version)
        ]
        newest = max(stored, default=0)
        return {one.group for one in self.trained if one.version > newest}

    def _manifest(self, version: int) -> Manifest | None:
        read = partial(read_manifest, self._bucket, self._run, version)
        found = evidence_of_version(self._bucket, self._run, version, read)
        return found.value if isinstance(found, Sound) else None

    def _add(self, manifest: Manifest) -> None:
        version = manifest.version
        step = CommitMetadata.of(manifest.metadata, run=self._bucket.url, version=version)
        self.settled |= self._groups.intersection(step.settled_groups())
        for place, group in enumerate(step.consumed):
            if group in self._groups:
                stated = step.hashes[place] if step.hashes else ""
                self.trained.append(Trained(group, version, stated))
