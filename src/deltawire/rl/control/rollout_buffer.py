"""The trainer's side of ``rollouts/``: finished groups, oldest first, each settled exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from deltawire.errors import CorruptError
from deltawire.rl.control.rollout_reader import Bounds, read_group
from deltawire.rl.control.staleness import StalenessPolicy
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.rollouts import Group

DropCause = Literal["stale", "failed", "damaged", "unknown version", "withheld"]

MIN_EPISODES = 2
"""Where failures left fewer episodes, there is nothing to compare with and no advantage."""


@dataclass
class BufferedGroup:
    """A group that waits to be trained on; ``hash`` is of its bytes. ``place`` is its place in the
    order of granting, for policies that ask; ``oldest`` and ``newest`` are versions in it."""

    sequence: int
    group: Group
    hash: str = ""
    place: int = 0
    oldest: int = field(init=False)
    newest: int = field(init=False)

    def __post_init__(self) -> None:
        self.oldest, self.newest = self.group.oldest_version, self.group.newest_version


@dataclass(frozen=True)
class Drop:
    """A group that is not trained on, and why: too old (``stale``), too few episodes that did not
    fail (``failed``, with the first one's cause as ``detail``), not readable (``damaged``), drawn
    by a version that does not exist, or of a family that is down-weighted (``withheld``).
    ``tokens`` are those that the model drew."""

    worker: str
    sequence: int
    cause: DropCause
    detail: str = ""
    family: str = ""
    tokens: int = 0

    @classmethod
    def of(cls, pooled: BufferedGroup, cause: DropCause, detail: str = "") -> Drop:
        """The record of a group that was read."""
        group = pooled.group
        return cls(group.worker, pooled.sequence, cause, detail, group.family[:64], group.tokens)


@dataclass
class Batch:
    """What one step trains on, and what was dropped on the way."""

    taken: list[BufferedGroup]
    staleness: list[int]
    drops: list[Drop] = field(default_factory=list)

    @property
    def dropped(self) -> list[tuple[str, int]]:
        """The dropped groups as commit metadata names them."""
        return [(drop.worker, drop.sequence) for drop in self.drops]


@dataclass
class _Silence:
    """Since when a worker was neither heard of nor alive, and when it is asked again."""

    since: float
    due_at: float


class RolloutBuffer:
    """Fetches groups by polling each worker's next sequence, and hands out batches.

    A group that is damaged, or beyond its ``bounds``, is dropped and its key kept in `damaged`.
    One of which failures left fewer than `MIN_EPISODES` episodes is dropped too; `failed` counts
    those in a row, and `failure` is the last one's first cause. Whatever is dropped counts as
    settled, so that its credit comes back. ``arrive`` is told of each stored group once, and
    answers its place
    (`deltawire.rl.control.staleness.StalenessPolicy.arrive`). What ``withhold`` names is dropped
    when it comes (`deltawire.reward_monitor.watch`).
    """

    def __init__(
        self,
        bucket: Bucket,
        ledger: Ledger,
        *,
        limit: int,
        bounds: Bounds | None = None,
        arrive: Callable[[str, int | None], int] = lambda _worker, _oldest: 0,
        withhold: Callable[[Group, int], bool] = lambda _group, _sequence: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._withhold = withhold
        self._bucket = bucket
        self._bounds = bounds
        self._ledger = ledger
        self._limit = limit
        self._next: dict[str, int] = {}
        self._silences: dict[str, _Silence] = {}
        self._clock = clock
        self._waiting: list[BufferedGroup] = []
        self._requeued: list[BufferedGroup] = []
        self._dropped: list[Drop] = []
        self._arrive = arrive
        self.damaged: list[str] = []
        self.failed = 0
        self.failure = ""

    @property
    def waiting(self) -> int:
        """How many groups wait."""
        return len(self._waiting) + len(self._requeued)

    def stored(self, worker: str) -> int:
        """How many groups the worker has stored, as far as was seen."""
        return self._next.get(worker, 0)

    def dropping(self, worker: str) -> int:
        """How many of a worker's groups hold no credit although nothing has settled them yet: they
        were dropped and not yet reported with a batch, or were requeued."""
        dropped = sum(drop.worker == worker for drop in self._dropped)
        return dropped + sum(pooled.group.worker == worker for pooled in self._requeued)

    def poll(self, workers: Collection[str], alive: Collection[str] | None = None) -> int:
        """Fetch what these workers, and all that were ever named, have stored since the last look;
        returns how many groups.

        A worker's last groups may be seen after it is gone, a put being on its way for long. So
        who is not ``alive`` (None is all) is asked again each time that his silence has doubled:
        of those that are gone there are ever more.
        """
        now = self._clock()
        for worker in workers:
            self._silences.setdefault(worker, _Silence(now, now))
        found = 0
        due = (
            worker
            for worker, silence in self._silences.items()
            if alive is None or worker in alive or silence.due_at <= now
        )
        for worker in sorted(due):
            self._next.setdefault(worker, self._ledger.below.get(worker, 0))
            before = found
            while len(self._waiting) < 2 * self._limit:
                sequence = self._next[worker]
                if not self._ledger.settled(worker, sequence) and not self._fetch(worker, sequence):
                    break
                self._next[worker] = sequence + 1
                found += 1
            silence = self._silences[worker]
            if found > before or alive is None or worker in alive:
                silence.since, silence.due_at = now, now
            elif len(self._waiting) < 2 * self._limit:
                silence.due_at = 2 * now - silence.since
        return found

    def _fetch(self, worker: str, sequence: int) -> bool:
        key = keys.rollout(worker, sequence)
        try:
            found = read_group(self._bucket, worker, sequence, bounds=self._bounds)
            if found is None:
                return False
        except CorruptError:
            self.damaged.append(key)
            self._dropped.append(Drop(worker, sequence, "damaged"))
            self._arrive(worker, None)
            return True
        group, digest = found
        pooled = BufferedGroup(sequence, group, digest)
        pooled.place = self._arrive(worker, pooled.oldest if pooled.oldest >= 0 else None)
        causes = [t.cause for t in group.trajectories if t.cause]
        if causes and len({episode for _, episode, _ in group.trained()}) < MIN_EPISODES:
            self.failed, self.failure = self.failed + 1, causes[0]
            self._dropped.append(Drop.of(pooled, "failed", causes[0]))
        elif self._withhold(group, sequence):
            self._dropped.append(Drop.of(pooled, "withheld"))
        else:
            self.failed = 0
            self._waiting.append(pooled)
        return True

    def take(
        self, policy: StalenessPolicy, *, version: int, alive: Collection[str] = ()
    ) -> Batch | None:
        """What ``policy`` gives a step from ``version``, None if it waits for more.

        What it evicts is dropped, and so is any group that claims a version which does not exist
        yet; they are reported with the next batch that is returned.
        """
        known = []
        for pooled in self._waiting:
            if pooled.newest > version:
                self._dropped.append(Drop.of(pooled, "unknown version"))
            else:
                known.append(pooled)
        choice = policy.choose(known, self._requeued, version=version, alive=alive)
        self._dropped += [Drop.of(pooled, "stale") for pooled in choice.evicted]
        gone = {id(pooled) for pooled in (*choice.taken, *choice.evicted, *choice.requeued)}
        self._waiting = [pooled for pooled in known if id(pooled) not in gone]
        self._requeued = choice.requeued
        if not choice.taken:
            return None
        staleness = [version - pooled.oldest for pooled in choice.taken]
        drops, self._dropped = self._dropped, []
        return Batch(choice.taken, staleness, drops)

    def fetch(self, metadata: CommitMetadata) -> list[BufferedGroup]:
        """Commit metadata's consumed groups again, in order, for a step that is done over; raises
        `CorruptError`."""
        again = []
        for place, (worker, sequence) in enumerate(metadata.consumed):
            expected = metadata.hashes[place] if metadata.hashes else ""
            found = read_group(self._bucket, worker, sequence, expected=expected)
            if found is None:
                key = keys.rollout(worker, sequence)
                raise CorruptError("a consumed group is missing", run=self._bucket.url, key=key)
            again.append(BufferedGroup(sequence, *found))
        return again
