"""Rollout buffer: finished groups that wait for a training step, each settled exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deltawire.errors import CorruptError, SignatureError
from deltawire.rl.allocation.allocator import Allocator, OpenParts, Ready
from deltawire.rl.control.incidents import Incidents
from deltawire.rl.control.quota import Quota
from deltawire.rl.control.rollout_reader import Bounds, read_group, without_traceback
from deltawire.rl.control.staleness import StalenessPolicy
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger, PromptRecord
from deltawire.wire.rollouts import Group, RefusedGroupError

DropCause = Literal[
    "stale",
    "failed",
    "damaged",
    "unsigned",
    "unknown version",
    "withheld",
    "not granted",
    "quarantined",
    "skipped",
    "deferred",
    "repeated",
]

MIN_EPISODES = 2
"""With fewer episodes left after failures, there is nothing to compare and no advantage."""
READERS = 64
MOST_MISSED = 1024
"""The most workers whose next group one poll asks for and may not find: at 20 ms a request, a third
of a second with `READERS` requests at once."""
MAX_DAMAGED = 1024
QUARANTINE_AFTER = 8
"""Damaged groups of a worker after which it is quarantined, if they are more than a quarter of all
its groups: storage damages few. Where nonces tell who stored a group, objects that cannot be read
count only if they are so many in a row: another writer may have stored them in the worker's
name."""


@dataclass
class BufferedGroup:
    """A group that waits to be trained on.

    ``hash`` is the hash of its bytes, and ``place`` its position in the order of granting, for
    policies that need it. ``drawn`` is the position of its task, as `DrawBook.arrive` gives it.
    ``oldest`` and ``newest`` are versions that sampled it. With allocation it is ``part`` of a
    prompt, and the first one stands for the ``others`` and carries the ``record`` of the prompt;
    ``oldest`` and ``newest`` are then those of all parts.
    """

    sequence: int
    group: Group
    hash: str = ""
    place: int = 0
    drawn: int | None = None
    part: int = 0
    others: list[BufferedGroup] = field(default_factory=list)
    record: PromptRecord | None = None
    oldest: int = field(init=False)
    newest: int = field(init=False)

    @property
    def worker(self) -> str:
        """The worker that stored it."""
        return self.group.worker

    def __post_init__(self) -> None:
        self.oldest, self.newest = self.group.oldest_version, self.group.newest_version

    @property
    def parts(self) -> list[BufferedGroup]:
        """The stored groups of this entry: itself, and the others of its prompt."""
        return [self, *self.others]

    @classmethod
    def joined(cls, ready: Ready[BufferedGroup]) -> BufferedGroup:
        """The entry of a decided prompt: its first part, standing for all."""
        first = ready.parts[0]
        first.others, first.record = ready.parts[1:], ready.record
        oldest = [one.oldest for one in ready.parts if one.oldest >= 0]
        first.oldest = min(oldest, default=first.oldest)
        first.newest = max(one.newest for one in ready.parts)
        return first


@dataclass(frozen=True)
class Drop:
    """A group that is not trained on, and the cause.

    Its prompt was ``skipped`` or ``deferred`` (`deltawire.rl.allocation`). It is too old
    (``stale``), too few of its episodes completed (``failed``, with the first cause
    as ``detail``), it cannot be read (``damaged``), the worker's key did not sign it
    (``unsigned``), a version that does not exist sampled it, its family is down-weighted
    (``withheld``), its nonce is not of a granted group, its worker is quarantined, or another group
    holds one of its answers (``repeated``, `deltawire.rl.control.trained_answers`). ``tokens``
    counts the tokens that were sampled.
    """

    worker: str
    sequence: int
    cause: DropCause
    detail: str = ""
    family: str = ""
    tokens: int = 0

    @classmethod
    def of(cls, buffered: BufferedGroup, cause: DropCause, detail: str = "") -> Drop:
        """The record of a group that was read."""
        group = buffered.group
        return cls(group.worker, buffered.sequence, cause, detail, group.family[:64], group.tokens)


@dataclass
class Batch:
    """The groups of one step, and the groups that were dropped since the previous step.

    ``parts`` are the numbers of consecutive groups that are one prompt's, empty without allocation;
    ``prompts`` records what was decided about prompts since the previous step.
    """

    taken: list[BufferedGroup]
    staleness: list[int]
    drops: list[Drop] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    prompts: list[PromptRecord] = field(default_factory=list)

    @property
    def dropped(self) -> list[tuple[str, int]]:
        """The dropped groups, each as (worker, sequence)."""
        return [(drop.worker, drop.sequence) for drop in self.drops]


@dataclass(frozen=True)
class _Found:
    """A group that was read, and the hash of its bytes; of a learner's group also its ``answers``,
    None if they are not known."""

    group: Group
    hash: str
    answers: list[str] | None

    @property
    def nonce(self) -> str:
        return self.group.nonce


class AnswerBook(Protocol):
    """Decides which group holds an answer (`deltawire.rl.control.trained_answers`)."""

    def read(self, group: Group, sequence: int) -> list[str] | None:
        """The answers of a learner's group; called by any thread."""
        ...

    def claim(self, group: Group, sequence: int, answers: list[str] | None) -> str:
        """Why a group is refused; empty if it is not."""
        ...


class Guard(Protocol):
    """Decides whose groups count (`deltawire.rl.control.worker_guard`)."""

    incidents: Incidents
    quota: Quota

    def self_attested(self) -> list[str]:
        """The parts of groups that are trusted without recomputing them."""
        ...

    def check_nonce(self, worker: str, nonce: str) -> str:
        """Why a group with this nonce was not granted to the worker; empty if it was."""
        ...

    def arrived(self, buffered: BufferedGroup) -> None:
        """Called once with each group that may be trained on."""
        ...


class RolloutBuffer:
    """Fetches each worker's next groups, and hands out batches.

    A group that is damaged, or exceeds its ``bounds``, is dropped and its key kept in ``damaged``.
    A worker that stores too many of them is quarantined: its groups are no longer read. So are the
    groups of a worker that the ``guard`` quarantines for another reason; its waiting groups are
    dropped. A group that was not granted by its nonce is dropped too, and the worker is not blamed
    for it. A group with fewer than `MIN_EPISODES` completed episodes is dropped too; ``failed``
    counts those in a row, and ``failure`` is the last one's first cause. A dropped group counts as
    settled, so its credit is granted again. ``arrive`` is called once for each stored group and
    returns its place (`deltawire.rl.control.staleness.StalenessPolicy.arrive`). Groups for which
    ``withhold`` is true are dropped on arrival (`deltawire.reward_monitor.watch`), and those whose
    ``answers`` another group holds. ``drawn`` gives
    the position of the task of each group that could be read and was granted.

    Example::

        buffer = RolloutBuffer(bucket, ledger, limit=policy.limit)
        buffer.poll(["w0", "w1"])
        batch = buffer.next_batch(policy, version=7)
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
        guard: Guard | None = None,
        drawn: Callable[[BufferedGroup], int | None] = lambda _: None,
        readers: int | None = None,
        allocator: Allocator[BufferedGroup] | None = None,
        owed: Callable[[], OpenParts] = OpenParts,
        answers: AnswerBook | None = None,
    ) -> None:
        self._answers = answers
        self._allocator = allocator
        self._owed = owed
        self._guard = guard
        self._drawn = drawn
        self.incidents = guard.incidents if guard else Incidents()
        self._quota = guard.quota if guard else Quota(1.0)
        self._withhold = withhold
        self._bucket = bucket
        self._bounds = bounds
        self._ledger = ledger
        self._limit = limit
        # Reading a folder does not wait for a network, so threads would only add cost.
        count = (1 if bucket.local else READERS) if readers is None else readers
        self._readers = ThreadPoolExecutor(count, "rollouts") if count > 1 else None
        self._next: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        """By worker, the poll that asked for its next group last."""
        self._polls = 0
        self._waiting: list[BufferedGroup] = []
        self._requeued: list[BufferedGroup] = []
        self._dropped: list[Drop] = []
        self._arrive = arrive
        self.damaged: list[str] = []
        self.proven: set[str] = set()
        """Workers that stored a group that could be read and was granted."""
        self._damaged_of: Counter[str] = Counter()
        self._fetched_of: Counter[str] = Counter()
        self._unreadable: Counter[str] = Counter()
        self.failed = 0
        self.failing: set[str] = set()
        """The workers of the groups that ``failed`` counts."""
        self.failure = ""

    @property
    def quarantined(self) -> dict[str, str]:
        """Workers whose groups are neither read nor trained on, with the reason."""
        return self.incidents.quarantined

    def self_attested(self) -> list[str]:
        """The parts of the groups that are trusted without recomputing them."""
        return self._guard.self_attested() if self._guard else []

    @property
    def waiting(self) -> int:
        """The number of groups that wait."""
        pending = 0 if self._allocator is None else self._allocator.waiting
        every = (*self._waiting, *self._requeued)
        return pending + sum(len(one.parts) for one in every)

    def stored(self, worker: str) -> int:
        """Returns how many groups the worker has stored, as far as they were fetched."""
        return self._next.get(worker, 0)

    def dropping(self) -> Counter[str]:
        """Returns, by worker, how many of its unsettled groups hold no credit.

        They were dropped and not yet reported with a batch, or requeued.
        """
        found = Counter(drop.worker for drop in self._dropped)
        found.update(part.worker for one in self._requeued for part in one.parts)
        return found

    def without_credit(self) -> set[tuple[str, int]]:
        """The unsettled groups that hold no credit, each as (worker, sequence)."""
        requeued = {(p.worker, p.sequence) for one in self._requeued for p in one.parts}
        return requeued | {(drop.worker, drop.sequence) for drop in self._dropped}

    def forget(self, worker: str) -> None:
        """Forgets a worker that has left; all its groups must be settled."""
        for table in (
            self._next,
            self._asked,
            self._damaged_of,
            self._fetched_of,
            self._unreadable,
        ):
            table.pop(worker, None)
        self.proven.discard(worker)
        self._quota.forget(worker)

    def poll(self, workers: Collection[str], granted: Mapping[str, int] | None = None) -> int:
        """Fetches the groups that these workers have stored; returns how many.

        In each round every worker contributes one group, so that no worker comes first. Sequence
        numbers that were not granted are not read; ``granted`` None reads any. Of more than
        `MOST_MISSED` workers that may have stored one, those asked longest ago are asked.
        """
        for worker in workers:
            self._next.setdefault(worker, self._ledger.below.get(worker, 0))
        found = 0
        active = self._turn(self._wanted(set(workers) - self.quarantined.keys(), granted))
        while active and (room := 2 * self._limit - len(self._waiting)) > 0:
            wanted = self._wanted(active, granted)
            turn, waiting = wanted[:room], wanted[room:]
            results = self._read_all([(worker, self._next[worker]) for worker in turn])
            active = []
            for worker, result in zip(turn, results, strict=True):
                if result is not None and worker not in self.quarantined:
                    if not isinstance(result, SignatureError):
                        self._quota.delivered(worker)
                    self._add(worker, self._next[worker], result)
                    self._next[worker] += 1
                    found += 1
                    active.append(worker)
                else:
                    self._asked[worker] = self._polls
            active = [*waiting, *active]
        return found

    def _wanted(self, workers: Collection[str], granted: Mapping[str, int] | None) -> Sequence[str]:
        """Returns the workers that were granted a group which was not read yet."""
        found = []
        for worker in workers:
            while self._ledger.settled(worker, self._next[worker]):
                self._next[worker] += 1
            if granted is None or self._next[worker] < granted.get(worker, 0):
                found.append(worker)
        return found

    def _turn(self, workers: Sequence[str]) -> Sequence[str]:
        """Returns the workers that this poll asks, in order of their names."""
        self._polls += 1
        if len(workers) > MOST_MISSED:
            order = sorted(workers, key=lambda name: (self._asked.get(name, 0), name))
            workers = order[:MOST_MISSED]
        return sorted(workers)

    def close(self) -> None:
        """Ends the threads that read groups."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)

    def _read_all(self, names: Sequence[tuple[str, int]]) -> list[_Found | CorruptError | None]:
        if self._readers is None or len(names) < 2:
            return [self._read(name) for name in names]
        return list(self._readers.map(self._read, names))

    def _read(self, name: tuple[str, int]) -> _Found | CorruptError | None:
        try:
            found = read_group(self._bucket, *name, bounds=self._bounds)
        except CorruptError as error:
            return without_traceback(error)
        if found is None:
            return None
        answers = [] if self._answers is None else self._answers.read(found[0], name[1])
        return _Found(*found, answers)

    def _add(self, worker: str, sequence: int, result: _Found | CorruptError) -> None:
        if isinstance(result, SignatureError):  # Not the worker's doing: it is not blamed.
            self.incidents.report(worker, "unsigned", f"group {sequence}: {result.message}")
            self._dropped.append(Drop(worker, sequence, "unsigned"))
            self._arrive(worker, None)
            return
        self._fetched_of[worker] += 1
        if isinstance(result, CorruptError) and not isinstance(result, RefusedGroupError):
            self._unreadable[worker] += 1
            row = self._unreadable[worker] >= QUARANTINE_AFTER
            blame = self._guard is None or row
            self._add_damaged(worker, sequence, result.message, blame=blame)
            return
        if self._guard and (fault := self._guard.check_nonce(worker, result.nonce)):
            self.incidents.report(worker, "not granted", f"group {sequence}: {fault}")
            self._dropped.append(Drop(worker, sequence, "not granted"))
            self._arrive(worker, None)
            return
        self._unreadable[worker] = 0
        if isinstance(result, RefusedGroupError):
            self._add_damaged(worker, sequence, result.message, blame=True)
            return
        group = result.group
        repeated = (
            "" if self._answers is None else self._answers.claim(group, sequence, result.answers)
        )
        self.proven.add(worker)
        buffered = BufferedGroup(sequence, group, result.hash)
        buffered.place = self._arrive(worker, buffered.oldest if buffered.oldest >= 0 else None)
        buffered.drawn = self._drawn(buffered)
        causes = [t.cause for t in group.trajectories if t.cause]
        if causes and len({episode for _, episode, _ in group.trained()}) < MIN_EPISODES:
            self.failed, self.failure = self.failed + 1, causes[0]
            self.failing.add(worker)
            self._dropped.append(Drop.of(buffered, "failed", causes[0]))
        elif repeated:
            self._dropped.append(Drop.of(buffered, "repeated", repeated))
        elif self._withhold(group, sequence):
            self._dropped.append(Drop.of(buffered, "withheld"))
        else:
            self.failed, self.failing = 0, set()
            if self._guard is not None:
                self._guard.arrived(buffered)
            if self._allocator is None:
                self._waiting.append(buffered)
            else:
                self._allocator.arrived(buffered)

    def _add_damaged(self, worker: str, sequence: int, fault: str, *, blame: bool) -> None:
        self.damaged.append(keys.rollout(worker, sequence))
        del self.damaged[:-MAX_DAMAGED]
        self._damaged_of[worker] += 1
        damaged = self._damaged_of[worker]
        self._dropped.append(Drop(worker, sequence, "damaged"))
        self._arrive(worker, None)
        detail = f"group {sequence}: {fault}"
        if blame and damaged >= QUARANTINE_AFTER and 4 * damaged > self._fetched_of[worker]:
            self.incidents.quarantine(worker, "damaged", detail)
        else:
            self.incidents.report(worker, "damaged", detail)

    def _drop_quarantined(self) -> None:
        """Drops the waiting groups of quarantined workers."""
        if not self.quarantined:
            return
        if self._allocator is not None:
            left = self._allocator.remove(self.quarantined)
            self._dropped += [Drop.of(one, "quarantined") for one in left]
        for waiting in (self._waiting, self._requeued):
            gone = [one for one in waiting if any(p.worker in self.quarantined for p in one.parts)]
            self._dropped += [Drop.of(p, "quarantined") for one in gone for p in one.parts]
            lost = {id(one) for one in gone}
            waiting[:] = [one for one in waiting if id(one) not in lost]

    def _allocate(self, version: int) -> None:
        """Moves decided prompts to the groups that wait, and drops the others' groups."""
        assert self._allocator is not None
        ready, dropped = self._allocator.decide_all(
            version=version, waiting=len(self._waiting), owed=self._owed()
        )
        self._waiting += [BufferedGroup.joined(one) for one in ready]
        self._dropped += [Drop.of(one, cause) for one, cause in dropped]

    def next_batch(
        self, policy: StalenessPolicy, *, version: int, alive: Collection[str] = ()
    ) -> Batch | None:
        """The batch that ``policy`` chooses for a step from ``version``; None if there are too few
        groups.

        Groups that the policy evicts, or that name a version which does not exist yet, are dropped
        and reported with the next batch.
        """
        self._drop_quarantined()
        if self._allocator is not None:
            self._allocate(version)
        known = []
        for buffered in self._waiting:
            if buffered.newest > version:
                self._dropped += [Drop.of(part, "unknown version") for part in buffered.parts]
            else:
                known.append(buffered)
        choice = self._quota.choose(
            lambda shown: policy.choose(shown, self._requeued, version=version, alive=alive),
            known,
            groups_per_step=policy.groups_per_step,
        )
        self._dropped += [Drop.of(part, "stale") for one in choice.evicted for part in one.parts]
        gone = {id(one) for one in (*choice.taken, *choice.evicted, *choice.requeued)}
        self._waiting = [buffered for buffered in known if id(buffered) not in gone]
        self._requeued = choice.requeued
        if not choice.taken:
            return None
        taken = [part for one in choice.taken for part in one.parts]
        staleness = [version - part.group.oldest_version for part in taken]
        drops, self._dropped = self._dropped, []
        if self._allocator is None:
            return Batch(taken, staleness, drops)
        prompts = self._allocator.take_records()
        prompts += [one.record for one in choice.taken if one.record is not None]
        return Batch(taken, staleness, drops, [len(one.parts) for one in choice.taken], prompts)


def read_consumed(bucket: Bucket, metadata: CommitMetadata) -> list[BufferedGroup]:
    """Reads the groups that a version consumed, in order; raises `CorruptError`."""
    groups = []
    for place, (worker, sequence) in enumerate(metadata.consumed):
        expected = metadata.hashes[place] if metadata.hashes else ""
        found = read_group(bucket, worker, sequence, expected=expected)
        if found is None:
            key = keys.rollout(worker, sequence)
            raise CorruptError("a consumed group is missing", run=bucket.url, key=key)
        groups.append(BufferedGroup(sequence, *found))
    return groups
