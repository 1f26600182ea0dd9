"""Reads the groups that versions consumed, newest versions first, and adds them to the index.

Concurrency::

    run_reader's indexing thread ── advance() ──▶ manifests and groups of a few versions ──▶ index

The versions that were indexed before are known from the index itself, so that a page that is opened
again continues where the last one stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

from deltawire.errors import CorruptError, RetryError
from deltawire.rl.control.rollout_reader import read_group
from deltawire.store import Bucket
from deltawire.sync import committed_versions, read_manifest
from deltawire.watch.group_index import GroupIndex, GroupRow
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import Group
from deltawire.wire.run import Run

READERS = 8
"""Groups read at once from a store that is not on this machine."""

Place = tuple[str, int, str]
"""A worker, a sequence and the expected hash."""


class GroupIndexer:
    """Indexes the versions of a run in turns of bounded time.

    ``behind`` is the number of versions still to be indexed, ``listed`` are those that were
    committed when it last looked; None before it looked.
    """

    def __init__(self, bucket: Bucket, run: Run, index: GroupIndex) -> None:
        self._bucket = bucket
        self._run = run
        self._index = index
        self._todo: list[int] = []
        self._top: int | None = None
        self.listed: list[int] | None = None

    @property
    def behind(self) -> int:
        """The number of versions that are not indexed yet."""
        return len(self._todo)

    def advance(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Indexes versions for about so many seconds; returns whether any was.

        Raises `RetryError` if the store does not answer; the version in hand is then read again.
        """
        self._find_new()
        until, began = time.monotonic() + seconds, len(self._todo)
        readers = ThreadPoolExecutor(1 if self._bucket.local else READERS, "watch-groups")
        with readers:
            while self._todo and time.monotonic() < until and not stop():
                self._index_version(self._todo[-1], readers)
                self._todo.pop()
        return len(self._todo) < began

    def _find_new(self) -> None:
        """Finds versions that were committed since the last call."""
        fresh = sorted(committed_versions(self._bucket, newer_than=self._top))
        self.listed = [*(self.listed or []), *fresh]
        if self._top is None:
            done = self._index.indexed_versions()
            fresh = [version for version in fresh if version > 0 and version not in done]
            self._top = max([0, *done, *fresh])
        elif fresh:
            self._top = fresh[-1]
        self._todo += fresh

    def _index_version(self, version: int, readers: ThreadPoolExecutor) -> None:
        metadata, at = CommitMetadata(), 0.0
        with contextlib.suppress(CorruptError):
            manifest = read_manifest(self._bucket, self._run, version)
            if manifest is not None:
                at = manifest.created_at
                metadata = CommitMetadata.of(
                    manifest.metadata, run=self._bucket.url, version=version
                )
        hashes = metadata.hashes or [""] * len(metadata.consumed)
        places = [
            (worker, sequence, expected)
            for (worker, sequence), expected in zip(metadata.consumed, hashes, strict=True)
        ]
        rows: list[GroupRow] = []
        missing: list[tuple[str, int, str]] = []
        for (worker, sequence, _), found in zip(
            places, readers.map(self._read, places), strict=True
        ):
            if isinstance(found, str):
                missing.append((worker, sequence, found))
            else:
                rows.append(describe_group(found, sequence, at=at, trained=version))
        dropped: Iterator[tuple[str, int]] = metadata.dropped_groups()
        self._index.add_version(version, at, rows, missing, dropped)

    def _read(self, place: Place) -> Group | str:
        """The group at a place, or the status of one that cannot be read."""
        worker, sequence, expected = place
        try:
            found = read_group(self._bucket, worker, sequence, expected=expected)
        except RetryError:
            raise
        except CorruptError:
            return "damaged"
        return "gone" if found is None else found[0]


def describe_group(group: Group, sequence: int, *, at: float, trained: int | None) -> GroupRow:
    """Returns the row of a group that was read."""
    episodes = group.episodes
    rewards = dict(zip(episodes, (t.reward for t in group.trajectories), strict=True))
    failed = {e: t.cause for e, t in zip(episodes, group.trajectories, strict=True) if t.cause}
    counted = [reward for episode, reward in rewards.items() if episode not in failed]
    low, high = group.oldest_version, group.newest_version
    return GroupRow(
        worker=group.worker,
        sequence=sequence,
        at=at,
        reward=fmean(counted) if counted else 0.0,
        tokens=group.tokens,
        failed=len(failed),
        cause=next(iter(failed.values()), ""),
        low=low if low >= 0 else None,
        high=high if high >= 0 else None,
        trained=trained,
        task=group.task,
        family=group.family,
        answers=len(rewards),
        reward_min=min(counted, default=None),
        reward_max=max(counted, default=None),
        overlong=len(group.overlong_episodes),
        status="read",
    )
